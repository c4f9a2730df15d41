"""The report's charts as SVG: axes, line charts, and dots per seed. The page's style sheet colors them for light and dark."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xbm_app.report.groups import Group
from xbm_app.report.writing import Html, join, percent, plus_minus, tag

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 456, 34, 240  # the plotting area of a line chart
DOTS_LEFT, LANE = 24, 44  # of a dot chart: where its axis starts, and the height of a group
NARROWEST = 4.0  # smallest extent of a dot chart's axis, in points of R@1, so that noise does not fill the width

# ------------------------------------------------------------------ axes


@dataclass(frozen=True, eq=False)
class Scale:
    """An axis from `low` to `high`; `warp` maps values to a space in which the axis is linear."""

    low: float
    high: float
    ticks: tuple[float, ...]
    warp: Callable[[np.ndarray], np.ndarray] = np.asarray

    def place(self, values: np.ndarray, start: float, end: float) -> np.ndarray:
        """Positions between `start` (for `low`) and `end` (for `high`)."""
        low, high = self.warp(np.array([self.low, self.high], dtype=float))
        share = (self.warp(np.asarray(values, dtype=float)) - low) / (high - low)
        return start + share * (end - start)


def linear(values: Iterable[float], zero: bool = False, snug: bool = False, ticks: int = 5, most: float = math.inf) -> Scale:
    """A linear axis. `zero` includes 0; `snug` ends at the extreme values instead of the next ticks; none is above `most`."""
    low, high = _range(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(high) / 10 or 0.5
        low, high = low - (0 if zero and low >= 0 else room), min(high + room, most)
    step = _nice((high - low) / ticks)
    if not snug:
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    inside = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, tuple(round(i * step, 12) for i in inside))


def ranks(largest: int) -> Scale:
    """A logarithmic axis for K = 1 ... largest, with ticks at powers of two, or of ten if there would be too many."""
    largest = max(2, largest)
    base = 2 if largest <= 256 else 10
    return Scale(1, largest, tuple(float(base**i) for i in range(int(math.log(largest, base) + 1e-9) + 1)), np.log)


def counts(values: Iterable[float]) -> Scale:
    """An axis for counts that includes 0: linear up to 1, logarithmic above."""
    _, high = _range(values)
    decades = max(1, math.ceil(math.log10(max(high, 1)) - 1e-9))
    return Scale(0, 10.0**decades, (0.0, *(10.0**i for i in range(decades + 1))), _linear_then_log)


def tick_label(value: float) -> str:
    """The text of a tick: as many digits as needed, with a thousands separator; k and M from ten thousand.

    Example:
        >>> [tick_label(v) for v in (0, 0.25, 64, 1500, 10000, 2500000)]
        ['0', '0.25', '64', '1,500', '10k', '2.5M']
    """
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit or (name == "M" and abs(value) >= unit):
            return f"{value / unit:.4g}{name}".replace("-", "−")
    return (f"{value:,.0f}" if value == round(value) else f"{value:.4g}").replace("-", "−")


def _linear_then_log(values: np.ndarray) -> np.ndarray:
    return np.where(values <= 1, values, 1 + np.log10(np.maximum(values, 1)))


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [float(v) for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if step <= m * power * (1 + 1e-9))


# ------------------------------------------------------------------ line charts


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart.

    Attributes:
        name: its entry in the legend.
        colour: a class of the style sheet: "with", "without", "drift-10", "drift-100", "drift-1000".
        x: (n,) increasing.
        y: (n,), NaN leaves a gap.
        low: (n,) lower edge of a band around the line, or None.
        high: (n,) upper edge.
        dash: 0 is solid; 1 and 2 distinguish further lines of the same color.
    """

    name: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dash: int = 0

    @property
    def known(self) -> np.ndarray:
        """Positions of the points that are not gaps."""
        return np.flatnonzero(np.isfinite(self.y))


@dataclass(frozen=True, eq=False)
class Axes:
    """Both axes of a line chart, and how its values are written.

    Attributes:
        read_x: formats a position for the read-out, e.g. "K = 8".
        read_y: formats a value for the legend.
        start: the legend shows the values of the first point instead of the last.
    """

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    read_x: Callable[[float], str]
    read_y: Callable[[float], str]
    start: bool = False


def panel(title: str, lines: Sequence[Line], axes: Axes, summary: str, below: str = "") -> Html:
    """A chart with its title and a legend that shows values.

    Args:
        summary: a description for screen readers.
        below: a sentence under the chart.
    """
    shown = [line for line in lines if len(line.known)]
    position = axes.read_x(_resting(shown[0], axes)[0]) if shown else "nothing measured"
    return tag(
        "div",
        tag("div", tag("h4", title), tag("span", position, class_="at"), class_="head"),
        tag("ul", *(_legend_entry(line, axes) for line in shown), class_="legend"),
        svg(shown, axes, summary),
        tag("p", below) if below else None,
        class_="panel",
    )


def svg(lines: Sequence[Line], axes: Axes, summary: str) -> Html:
    """The drawing: grid, bands, lines; isolated points are dots."""
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
        parts.append(tag("text", tick_label(value), class_="tick", x=LEFT - 8, y=_n(y), dy="0.35em", text_anchor="end"))
    parts.append(tag("line", class_="base", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM))
    for value, x in zip(axes.x.ticks, axes.x.place(np.array(axes.x.ticks), LEFT, RIGHT)):
        parts.append(tag("line", class_="base", x1=_n(x), x2=_n(x), y1=BOTTOM, y2=BOTTOM + 5))
        parts.append(tag("text", tick_label(value), class_="tick", x=_n(x), y=BOTTOM + 21, text_anchor="middle"))
    parts.append(tag("text", axes.x_title, class_="axis-title", x=RIGHT, y=HEIGHT - 7, text_anchor="end"))
    return join(parts)


def _strokes(line: Line, axes: Axes) -> Html:
    xs, ys = axes.x.place(line.x, LEFT, RIGHT), axes.y.place(line.y, BOTTOM, TOP)
    parts = []
    for stretch in unbroken(line.y):
        if len(stretch) == 1:
            parts.append(tag("circle", class_="dot", cx=_n(xs[stretch[0]]), cy=_n(ys[stretch[0]]), r=3.5))
        else:
            path = "L".join(f"{_n(xs[i])} {_n(ys[i])}" for i in stretch)
            parts.append(tag("path", class_=f"line dash-{line.dash}", d=f"M{path}"))
    return tag("g", *parts, class_=line.colour)


def _band(line: Line, axes: Axes) -> Html | None:
    if line.low is None or line.high is None:
        return None
    xs = axes.x.place(line.x, LEFT, RIGHT)
    tops, bottoms = axes.y.place(line.high, BOTTOM, TOP), axes.y.place(line.low, BOTTOM, TOP)
    areas = []
    for stretch in unbroken(line.low + line.high):
        if len(stretch) > 1:
            edge = [f"{_n(xs[i])} {_n(tops[i])}" for i in stretch]
            edge += [f"{_n(xs[i])} {_n(bottoms[i])}" for i in reversed(stretch)]
            areas.append(tag("path", class_="band", d=f"M{'L'.join(edge)}Z"))
    return tag("g", *areas, class_=line.colour) if areas else None


def unbroken(y: np.ndarray) -> list[list[int]]:
    """Positions of the finite values, in stretches without a gap.

    Example:
        >>> unbroken(np.array([1.0, np.nan, 2.0, 3.0]))
        [[0], [2, 3]]
    """
    known = np.flatnonzero(np.isfinite(y))
    stretches = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return [stretch.tolist() for stretch in stretches if len(stretch)]


def _legend_entry(line: Line, axes: Axes) -> Html:
    stroke = tag("line", class_=f"line dash-{line.dash}", x1=1, x2=25, y1=5, y2=5)
    key = tag("svg", stroke, class_="key", viewBox="0 0 26 10", aria_hidden="true")
    return tag("li", key, line.name, " ", tag("b", axes.read_y(_resting(line, axes)[1])), class_=line.colour)


def _resting(line: Line, axes: Axes) -> tuple[float, float]:
    """The point that the legend shows while the pointer is elsewhere."""
    i = line.known[0 if axes.start else -1]
    return float(line.x[i]), float(line.y[i])


def _readings(lines: Sequence[Line], axes: Axes) -> str:
    """JSON for readout.js: for each point of each line its x in the drawing, its position and its value as text."""
    readings = []
    for line in lines:
        x, y = line.x[line.known], line.y[line.known]
        points = zip(x.tolist(), y.tolist(), axes.x.place(x, LEFT, RIGHT).tolist())
        readings.append([[round(place, 1), axes.read_x(x), axes.read_y(y)] for x, y, place in points])
    return json.dumps(readings, ensure_ascii=False, separators=(",", ":"))


def _n(value: float) -> str:
    return f"{value:.1f}"


# ------------------------------------------------------------------ R@1 per seed


def dot_panel(title: str, groups: Sequence[Group]) -> Html:
    """R@1 of groups of one loss, one lane per group: a dot per run, lines between runs of one seed, mean ± standard error."""
    names = ["with memory" if group.memory else "without" for group in groups]
    if len(set(names)) < len(names):
        names = [group.label for group in groups]
    dot = tag("circle", class_="dot", cx=5, cy=5, r=4)
    key = tag("svg", dot, class_="key round", viewBox="0 0 10 10", aria_hidden="true")
    entries = [
        tag("li", key, name, " ", tag("b", plus_minus(group.recall_at_1)), class_=group.side)
        for name, group in zip(names, groups)
    ]
    return tag(
        "div",
        tag("div", tag("h4", title), class_="head"),
        tag("ul", *entries, class_="legend"),
        _dots(groups, names),
        class_="panel",
    )


def _dots(groups: Sequence[Group], names: Sequence[str]) -> Html:
    values = [100 * value for group in groups for value in group.recall_by_seed.values()]
    room = max(0.0, NARROWEST - (max(values) - min(values))) / 2
    scale = linear([min(values) - room, max(values) + room])
    heights = [LANE * i + 26.0 for i in range(len(groups))]
    bottom = LANE * len(groups) + 8
    summary = [f"{n}: {', '.join(map(percent, group.recall_by_seed.values()))}." for n, group in zip(names, groups)]
    lanes = list(zip(groups, heights))
    joins = [_joins(a, b, y1, y2, scale) for a, y1 in lanes for b, y2 in lanes if not a.memory and b.memory]
    parts = []
    for value, x in zip(scale.ticks, _across(scale, scale.ticks)):
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=6, y2=bottom))
        parts.append(tag("text", tick_label(value), class_="tick", x=x, y=bottom + 18, text_anchor="middle"))
    parts.append(tag("text", "R@1, %", class_="axis-title", x=RIGHT, y=bottom + 42, text_anchor="end"))
    return tag(
        "svg",
        *parts,
        *joins,
        *(_lane(group, scale, y) for group, y in lanes),
        viewBox=f"0 0 {WIDTH} {bottom + 50}",
        class_="dots",
        role="img",
        aria_label=f"R@1 by seed. {' '.join(summary)}",
    )


def _across(scale: Scale, values: Sequence[float] | np.ndarray) -> list[str]:
    """Positions on the axis of a dot chart."""
    return [_n(x) for x in scale.place(np.array(values), DOTS_LEFT, RIGHT)]


def _lane(group: Group, scale: Scale, y: float) -> Html:
    stat = group.recall_at_1
    mean, low, high = _across(scale, 100 * (stat.mean + np.array([0, -stat.error, stat.error])))
    parts = [tag("line", class_="mean", x1=mean, x2=mean, y1=y - 12, y2=y + 12)]
    if math.isfinite(stat.error):
        parts.append(tag("line", class_="spread", x1=low, x2=high, y1=y, y2=y))
    dots = _across(scale, [100 * value for value in group.recall_by_seed.values()])
    return tag("g", *parts, *(tag("circle", class_="dot", cx=x, cy=y, r=5) for x in dots), class_=group.side)


def _joins(a: Group, b: Group, y1: float, y2: float, scale: Scale) -> Html:
    parts = []
    for seed in sorted(a.recall_by_seed.keys() & b.recall_by_seed.keys()):
        x1, x2 = _across(scale, [100 * a.recall_by_seed[seed], 100 * b.recall_by_seed[seed]])
        parts.append(tag("line", class_="join", x1=x1, x2=x2, y1=y1, y2=y2))
    return join(parts)
