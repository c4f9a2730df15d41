"""R@1 seed by seed: a lane for each group, a dot for each run, lines between the runs of one seed."""

import math
from collections.abc import Sequence

import numpy as np

from xbm_app.report.groups import Group
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.scales import Scale, label, linear
from xbm_app.report.wording import percent, plus_minus

WIDTH, LEFT, RIGHT, LANE = 480, 24, 456, 44
NARROWEST = 4.0  # points of R@1: less would blow chance up to the width of the page


def dot_panel(title: str, groups: Sequence[Group]) -> Html:
    """Groups of one loss and reduction under each other, with a legend that holds mean and standard error."""
    labels = ["with memory" if group.memory else "without" for group in groups]
    if len(set(labels)) < len(labels):
        labels = [group.label for group in groups]
    entries = [
        tag("li", _key(), name, " ", tag("b", plus_minus(group.recall_at_1)), class_=_colour(group))
        for name, group in zip(labels, groups)
    ]
    return tag(
        "div",
        tag("div", tag("h4", title), class_="head"),
        tag("ul", *entries, class_="legend"),
        _plot(groups, labels),
        class_="panel",
    )


def _plot(groups: Sequence[Group], labels: Sequence[str]) -> Html:
    values = [_values(group) for group in groups]
    scale = _scale([100 * value for lane in values for value in lane.values()])
    lanes = [LANE * i + 26.0 for i in range(len(groups))]
    bottom = LANE * len(groups) + 8
    summary = " ".join(f"{name}: {', '.join(map(percent, lane.values()))}." for name, lane in zip(labels, values))
    joins = [
        _joined(values[i], values[j], lanes[i], lanes[j], scale)
        for i, a in enumerate(groups)
        for j, b in enumerate(groups)
        if not a.memory and b.memory
    ]
    return tag(
        "svg",
        _axis(scale, bottom),
        *joins,
        *(_lane(group, list(lane.values()), scale, y) for group, lane, y in zip(groups, values, lanes)),
        viewBox=f"0 0 {WIDTH} {bottom + 50}",
        class_="dots",
        role="img",
        aria_label=f"R@1 by seed. {summary}",
    )


def _scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    room = max(0.0, NARROWEST - (high - low)) / 2
    return linear([low - room, high + room])


def _axis(scale: Scale, bottom: float) -> Html:
    parts = []
    for value, x in zip(scale.ticks, scale.place(np.array(scale.ticks), LEFT, RIGHT)):
        parts.append(tag("line", class_="grid", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=6, y2=bottom))
        parts.append(tag("text", label(value), class_="tick", x=f"{x:.1f}", y=bottom + 18, text_anchor="middle"))
    parts.append(tag("text", "R@1, %", class_="axis-title", x=RIGHT, y=bottom + 42, text_anchor="end"))
    return join(parts)


def _lane(group: Group, values: Sequence[float], scale: Scale, y: float) -> Html:
    stat = group.recall_at_1
    mean, low, high = scale.place(100 * (stat.mean + np.array([0, -stat.error, stat.error])), LEFT, RIGHT).tolist()
    parts = [tag("line", class_="mean", x1=f"{mean:.1f}", x2=f"{mean:.1f}", y1=y - 12, y2=y + 12)]
    if math.isfinite(stat.error):
        parts.append(tag("line", class_="spread", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=y, y2=y))
    places = scale.place(100 * np.array(values), LEFT, RIGHT)
    return tag("g", *parts, *(tag("circle", class_="dot", cx=f"{x:.1f}", cy=y, r=5) for x in places), class_=_colour(group))


def _joined(a: dict[int, float], b: dict[int, float], y1: float, y2: float, scale: Scale) -> Html:
    parts = []
    for seed in sorted(a.keys() & b.keys()):
        x1, x2 = scale.place(100 * np.array([a[seed], b[seed]]), LEFT, RIGHT)
        parts.append(tag("line", class_="join", x1=f"{x1:.1f}", x2=f"{x2:.1f}", y1=y1, y2=y2))
    return join(parts)


def _key() -> Html:
    return tag("svg", tag("circle", class_="dot", cx=5, cy=5, r=4), class_="key round", viewBox="0 0 10 10", aria_hidden="true")


def _colour(group: Group) -> str:
    return "with" if group.memory else "without"


def _values(group: Group) -> dict[int, float]:
    return {run.seed: value for run in group.runs if math.isfinite(value := run.recall.get("recall@1", math.nan))}
