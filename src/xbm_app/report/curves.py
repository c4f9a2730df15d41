"""The sections made of charts: recall, training, where negatives come from, drift."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from xbm_app.report.charts import Axes, Line, panel
from xbm_app.report.dots import dot_panel
from xbm_app.report.groups import Group, together
from xbm_app.report.markup import Html, tag
from xbm_app.report.scales import Scale, counts, linear, ranks
from xbm_app.report.traces import Curve, over_seeds
from xbm_app.report.wording import count, distance, listed, named, times

SPAN = "The line is the mean of the seeds, the band reaches from the lowest to the highest."


def figure(panels: Sequence[Html], caption: str) -> Html:
    return tag("figure", tag("div", *panels, class_="panels"), tag("figcaption", caption))


def recall_curves(groups: Sequence[Group]) -> Html | None:
    """R@K over K, one panel a loss."""
    drawn = [(group, over_seeds([(_ks(run.curve), np.array(run.curve)) for run in group.runs], bins=4096)) for group in groups]
    known = [(group, curve) for group, curve in drawn if curve is not None]
    if not known:
        return None
    x = ranks(int(max(curve.x[-1] for _, curve in known)))
    y = linear([100 * v for _, curve in known for v in (*curve.low, *curve.high)])
    axes = Axes(x, y, "K, logarithmic", "Recall@K, %", lambda k: f"K = {k:.0f}", lambda v: f"{v:.1f}", start=True)
    panels = []
    for loss in dict.fromkeys(group.loss for group, _ in known):
        lines = _lines([(group, curve) for group, curve in known if group.loss == loss], 100)
        told = ", ".join(f"{line.name} {line.y[0]:.1f} at K = 1 and {line.y[-1]:.1f} at K = {line.x[-1]:.0f}" for line in lines)
        panels.append(panel(named(loss), lines, axes, f"Recall at K, {named(loss)}: {told}."))
    many = any(len(group.runs) > 1 for group, _ in known)
    return figure(
        panels,
        "Share of queries with an image of their class among their K nearest. Higher is better. " + (SPAN if many else ""),
    )


def by_seed(groups: Sequence[Group]) -> Html | None:
    """R@1 of every run, once there is more than one."""
    if sum(group.recall_at_1.count for group in groups) < 2:
        return None
    panels, joined = [], False
    for kind in together(groups):
        members = [group for group in kind if group.recall_at_1.count]
        joined = joined or {False, True} == {group.memory for group in members}
        if members:
            panels.append(dot_panel(_title(members), members))
    caption = "A dot is a run, the upright stroke the mean of its group, the bar one standard error to either side."
    if joined:
        caption += (
            " Lines join runs of the same seed: where they lean to the right, the memory helped. Each panel has its own axis."
        )
    return figure(panels, caption)


def loss_curves(groups: Sequence[Group]) -> Html | None:
    drawn = _drawn(groups, "loss")
    panels = [
        panel(
            title,
            lines,
            _over_steps(lines, linear(_spans(lines), zero=True), "loss", lambda v: f"{v:.3g}"),
            _told(title, lines),
        )
        for title, lines in drawn
    ]
    if not panels:
        return None
    caption = "Training loss."
    if any(len(lines) > 1 for _, lines in drawn):
        caption += " With memory each anchor meets many more pairs, so heights differ by design: compare shapes, not values."
    return figure(panels, caption)


def evaluations(groups: Sequence[Group]) -> Html | None:
    def of(group: Group) -> Curve | None:
        pairs = [np.array(run.trace.evaluations, dtype=float).reshape(-1, 2) for run in group.runs]
        return over_seeds([(p[:, 0], 100 * p[:, 1]) for p in pairs])

    drawn = _panels(groups, of)
    if not any(len(line.x) > 1 for _, lines in drawn for line in lines):
        return None
    y = linear([v for _, lines in drawn for v in _spans(lines)])
    panels = [
        panel(title, lines, _over_steps(lines, y, "R@1, %", lambda v: f"{v:.1f}"), _told(title, lines))
        for title, lines in drawn
    ]
    return figure(panels, "R@1 at the evaluations made on the way.")


def negatives(groups: Sequence[Group]) -> Html | None:
    """Valid negatives per step from batch and memory, of the groups that have one."""
    shown = [group for group in groups if group.memory] or list(groups)
    drawn = []
    for group in shown:
        sources = (
            ("from the batch", "without", "valid_negatives_batch"),
            ("from the memory", "with", "valid_negatives_memory"),
        )
        lines = [
            _line(name, group, c, colour=colour) for name, colour, key in sources if (c := _series(group, key)) is not None
        ]
        if lines:
            drawn.append((group, lines))
    if not drawn:
        return None
    y = counts([v for _, lines in drawn for v in _spans(lines)])
    titles = _titles([group for group, _ in drawn])
    panels = [
        panel(title, lines, _over_steps(lines, y, "valid negatives per step", count), _told(title, lines), _sources(group))
        for title, (group, lines) in zip(titles, drawn)
    ]
    return figure(
        panels, "Negatives with a non-zero gradient in a step (the paper’s Figure 4). The axis is logarithmic above 1."
    )


def drift(groups: Sequence[Group]) -> Html | None:
    """How far embeddings move, of the groups with memory (of all, where none has one)."""
    shown = [group for group in groups if group.memory] or list(groups)
    drawn = []
    for group in shown:
        curves = [(delta, _series(group, f"drift_{delta}")) for delta in (10, 100, 1000)]
        lines = [_line(f"Δt = {delta:,}", group, c, colour=f"drift-{delta}") for delta, c in curves if c is not None]
        if lines:
            drawn.append((group, lines))
    if not drawn:
        return None
    y = linear([v for _, lines in drawn for v in _spans(lines)], zero=True)
    titles = _titles([group for group, _ in drawn])
    panels = [
        panel(title, lines, _over_steps(lines, y, "drift", distance), _told(title, lines), _slows(group, lines))
        for title, (group, lines) in zip(titles, drawn)
    ]
    caption = (
        "Mean squared distance between an image’s embedding now and Δt steps ago (the paper’s Figure 3); two unit vectors are "
        "at most 4 apart. The lower the lines, the longer a remembered embedding stays true."
    )
    return figure(panels, caption)


def _sources(group: Group) -> str:
    batch, memory = group.settled("valid_negatives_batch"), group.settled("valid_negatives_memory")
    if math.isnan(batch) or math.isnan(memory):
        return ""
    ratio = f", {times(memory / batch)} as many" if batch > 0 and memory > batch else ""
    return f"In the last quarter {count(batch)} a step from the batch and {count(memory)} from the memory{ratio}."


def _slows(group: Group, lines: Sequence[Line]) -> str:
    line = max(lines, key=lambda one: (one.colour == "drift-100", -len(one.name)))
    known = line.y[np.isfinite(line.y)]
    late = group.settled(line.colour.replace("-", "_"))
    if len(known) < 4 or math.isnan(late):
        return ""
    peak = float(known.max())
    if late < 0.8 * peak:
        return f"{line.name}: down from a peak of {distance(peak)} to {distance(late)} in the last quarter."
    return f"{line.name}: {distance(late)} in the last quarter, not below its peak of {distance(peak)} by much."


def _panels(groups: Sequence[Group], of: Callable[[Group], Curve | None]) -> list[tuple[str, list[Line]]]:
    """(title, lines without and with memory) for each loss and reduction."""
    panels = []
    for members in together(groups):
        known = [(group, curve) for group in members if (curve := of(group)) is not None]
        if known:
            panels.append((_title(members), _lines(known)))
    return panels


def _lines(curves: Sequence[tuple[Group, Curve]], scale: float = 1) -> list[Line]:
    """Lines of one panel, named as briefly as tells them apart."""
    groups = [group for group, _ in curves]
    short = ["with memory" if group.memory else "without" for group in groups]
    names = short
    if len(set(names)) < len(groups):
        names = [f"{group.reduction}, {name}" for group, name in zip(groups, short)]
    if len(set(names)) < len(groups):
        names = [group.label for group in groups]
    dashes = [short[:i].count(name) for i, name in enumerate(short)]
    return [_line(name, group, curve, scale, dash=min(dash, 2)) for name, (group, curve), dash in zip(names, curves, dashes)]


def _drawn(groups: Sequence[Group], key: str) -> list[tuple[str, list[Line]]]:
    return _panels(groups, lambda group: _series(group, key))


def _series(group: Group, key: str) -> Curve | None:
    return over_seeds([(run.trace.step, getattr(run.trace, key)) for run in group.runs])


def _line(name: str, group: Group, curve: Curve, scale: float = 1, colour: str = "", dash: int = 0) -> Line:
    colour = colour or ("with" if group.memory else "without")
    if len(group.runs) == 1:
        return Line(name, colour, curve.x, scale * curve.mean, dash=dash)
    return Line(name, colour, curve.x, scale * curve.mean, scale * curve.low, scale * curve.high, dash)


def _over_steps(lines: Sequence[Line], y: Scale, title: str, read: Callable[[float], str]) -> Axes:
    x = linear([v for line in lines for v in (line.x[0], line.x[-1])], zero=True, snug=True)
    return Axes(x, y, "step", title, lambda v: f"step {v:,.0f}", read)


def _spans(lines: Sequence[Line]) -> list[float]:
    ends = [values for line in lines for values in (line.y, line.low, line.high) if values is not None]
    return np.concatenate(ends).tolist() if ends else []


def _told(title: str, lines: Sequence[Line]) -> str:
    ends = [
        f"{line.name} from {line.y[k[0]]:.3g} to {line.y[k[-1]]:.3g}"
        for line in lines
        if len(k := np.flatnonzero(np.isfinite(line.y)))
    ]
    return f"{title}: {listed(ends)}." if ends else title


def _title(groups: Sequence[Group]) -> str:
    reductions = dict.fromkeys(group.reduction for group in groups if group.reduction)
    return ", ".join([named(groups[0].loss), *([" and ".join(reductions)] if reductions else [])])


def _titles(groups: Sequence[Group]) -> list[str]:
    titles = [_title([group]) for group in groups]
    return titles if len(set(titles)) == len(groups) else [group.label for group in groups]


def _ks(curve: Sequence[float]) -> np.ndarray:
    return np.arange(1, len(curve) + 1)
