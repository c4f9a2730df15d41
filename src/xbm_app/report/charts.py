"""Line charts as SVG, coloured by the page's style sheet so that they follow light and dark."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xbm_app.report.markup import Html, join, tag
from xbm_app.report.scales import Scale, label

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 456, 34, 240  # the plotting area


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart.

    Attributes:
        name: its entry in the legend.
        colour: a class of the style sheet: "with", "without", "drift-10", "drift-100", "drift-1000".
        x: (n,) increasing.
        y: (n,), NaN leaves a gap.
        low: (n,) and `high`: a band around the line, or None.
        dash: 0 is a whole line; 1 and 2 set further lines of the same colour apart.
    """

    name: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dash: int = 0


@dataclass(frozen=True, eq=False)
class Axes:
    """Attributes:
    read_x: turns a position into words for the read-out, e.g. "K = 8".
    read_y: formats a value for the legend.
    start: the legend shows the values of the first point rather than the last.
    """

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    read_x: Callable[[float], str]
    read_y: Callable[[float], str]
    start: bool = False


def panel(title: str, lines: Sequence[Line], axes: Axes, summary: str, below: str = "") -> Html:
    """A chart with its title and a legend that holds values.

    Args:
        summary: what a screen reader says instead of the picture.
        below: a sentence under the chart.
    """
    shown = [line for line in lines if np.isfinite(line.y).any()]
    at = axes.read_x(_resting(shown[0], axes)[0]) if shown else "nothing measured"
    return tag(
        "div",
        tag("div", tag("h4", title), tag("span", at, class_="at"), class_="head"),
        tag("ul", *(_legend_entry(line, axes) for line in shown), class_="legend"),
        svg(shown, axes, summary),
        tag("p", below) if below else None,
        class_="panel",
    )


def svg(lines: Sequence[Line], axes: Axes, summary: str) -> Html:
    """The drawing: grid, bands, lines; points that stand alone are dots."""
    return tag(
        "svg",
        _grid(axes),
        *(_band(line, axes) for line in lines),
        *(_strokes(line, axes) for line in lines),
        tag("line", class_="hair", x1=LEFT, x2=LEFT, y1=TOP, y2=BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=summary,
        data_lines=_readings(lines, axes),
    )


def _grid(axes: Axes) -> Html:
    parts = [tag("text", axes.y_title, class_="axis-title", x=2, y=16)]
    for value, y in zip(axes.y.ticks, axes.y.place(np.array(axes.y.ticks), BOTTOM, TOP)):
        parts.append(tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=_n(y), y2=_n(y)))
        parts.append(tag("text", label(value), class_="tick", x=LEFT - 8, y=_n(y), dy="0.35em", text_anchor="end"))
    parts.append(tag("line", class_="base", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM))
    for value, x in zip(axes.x.ticks, axes.x.place(np.array(axes.x.ticks), LEFT, RIGHT)):
        parts.append(tag("line", class_="base", x1=_n(x), x2=_n(x), y1=BOTTOM, y2=BOTTOM + 5))
        parts.append(tag("text", label(value), class_="tick", x=_n(x), y=BOTTOM + 21, text_anchor="middle"))
    parts.append(tag("text", axes.x_title, class_="axis-title", x=RIGHT, y=HEIGHT - 7, text_anchor="end"))
    return join(parts)


def _strokes(line: Line, axes: Axes) -> Html:
    xs, ys = axes.x.place(line.x, LEFT, RIGHT), axes.y.place(line.y, BOTTOM, TOP)
    parts = []
    for run in unbroken(line.y):
        if len(run) == 1:
            parts.append(tag("circle", class_="dot", cx=_n(xs[run[0]]), cy=_n(ys[run[0]]), r=3.5))
        else:
            path = "L".join(f"{_n(xs[i])} {_n(ys[i])}" for i in run)
            parts.append(tag("path", class_=f"line dash-{line.dash}", d=f"M{path}"))
    return tag("g", *parts, class_=line.colour)


def _band(line: Line, axes: Axes) -> Html | None:
    if line.low is None or line.high is None:
        return None
    xs = axes.x.place(line.x, LEFT, RIGHT)
    tops, bottoms = axes.y.place(line.high, BOTTOM, TOP), axes.y.place(line.low, BOTTOM, TOP)
    areas = []
    for run in unbroken(line.low + line.high):
        if len(run) > 1:
            edge = [f"{_n(xs[i])} {_n(tops[i])}" for i in run] + [f"{_n(xs[i])} {_n(bottoms[i])}" for i in reversed(run)]
            areas.append(tag("path", class_="band", d=f"M{'L'.join(edge)}Z"))
    return tag("g", *areas, class_=line.colour) if areas else None


def unbroken(y: np.ndarray) -> list[list[int]]:
    """Positions of the finite values, in stretches without a gap.

    Example:
        >>> unbroken(np.array([1.0, np.nan, 2.0, 3.0]))
        [[0], [2, 3]]
    """
    stretches: list[list[int]] = []
    for i in np.flatnonzero(np.isfinite(y)).tolist():
        if stretches and stretches[-1][-1] == i - 1:
            stretches[-1].append(i)
        else:
            stretches.append([i])
    return stretches


def _legend_entry(line: Line, axes: Axes) -> Html:
    stroke = tag("line", class_=f"line dash-{line.dash}", x1=1, x2=25, y1=5, y2=5)
    key = tag("svg", stroke, class_="key", viewBox="0 0 26 10", aria_hidden="true")
    return tag("li", key, line.name, " ", tag("b", axes.read_y(_resting(line, axes)[1])), class_=line.colour)


def _resting(line: Line, axes: Axes) -> tuple[float, float]:
    known = np.flatnonzero(np.isfinite(line.y))
    i = known[0] if axes.start else known[-1]
    return float(line.x[i]), float(line.y[i])


def _readings(lines: Sequence[Line], axes: Axes) -> str:
    """What the read-out needs: for each line its positions in the drawing, and the words for position and value."""
    readings = []
    for line in lines:
        known = np.isfinite(line.y)
        xs = axes.x.place(line.x[known], LEFT, RIGHT)
        points = zip(line.x[known].tolist(), line.y[known].tolist(), xs.tolist())
        readings.append([[round(at, 1), axes.read_x(x), axes.read_y(y)] for x, y, at in points])
    return json.dumps(readings, ensure_ascii=False, separators=(",", ":"))


def _n(value: float) -> str:
    return f"{value:.1f}"
