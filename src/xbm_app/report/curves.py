"""The report's sections of charts: recall, R@1 by seed, training, where negatives come from, drift."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from xbm_app.report.charts import Axes, Line, Scale, counts, dot_panel, linear, panel, ranks
from xbm_app.report.groups import Curve, Group, over_seeds, together
from xbm_app.report.writing import Html, count, distance, listed, loss_name, tag, times

BAND = "Lines are means over seeds; bands span the lowest to the highest seed."


def figure(panels: Sequence[Html], caption: str) -> Html:
    return tag("figure", tag("div", *panels, class_="panels"), tag("figcaption", caption))


def recall_curves(groups: Sequence[Group]) -> Html | None:
    """R@K over K, one panel per loss."""

    def recall_over_k(group: Group) -> Curve | None:
        return over_seeds([(np.arange(1, len(run.curve) + 1), np.array(run.curve)) for run in group.runs], bins=4096)

    known = _known(groups, recall_over_k)
    if not known:
        return None
    x = ranks(int(max(curve.x[-1] for _, curve in known)))
    y = linear([100.0, *(100 * v for _, curve in known for v in (*curve.low, *curve.high))], most=100)
    axes = Axes(x, y, "K, logarithmic", "Recall@K, %", lambda k: f"K = {k:.0f}", lambda v: f"{v:.1f}", start=True)
    panels = []
    for loss in dict.fromkeys(group.loss for group, _ in known):
        lines = _lines([(group, curve) for group, curve in known if group.loss == loss], 100)
        ends = ", ".join(f"{line.name} {line.y[0]:.1f} at K = 1 and {line.y[-1]:.1f} at K = {line.x[-1]:.0f}" for line in lines)
        panels.append(panel(loss_name(loss), lines, axes, f"Recall at K, {loss_name(loss)}: {ends}."))
    several = any(len(group.runs) > 1 for group, _ in known)
    caption = "Share of queries with an image of their class among their K nearest. Higher is better. "
    return figure(panels, caption + (BAND if several else ""))


def by_seed(groups: Sequence[Group]) -> Html | None:
    """R@1 of every run, if there is more than one."""
    if sum(group.recall_at_1.count for group in groups) < 2:
        return None
    panels, joined = [], False
    for kind in together(groups):
        members = [group for group in kind if group.recall_at_1.count]
        joined = joined or {False, True} == {group.memory for group in members}
        if members:
            panels.append(dot_panel(_title(members), members))
    caption = "Each dot is a run; the vertical stroke is the mean of its group, the bar one standard error on either side."
    if joined:
        caption += (
            " Lines connect runs of one seed; where they lean to the right, the memory helped. Each panel has its own axis."
        )
    return figure(panels, caption)


def loss_curves(groups: Sequence[Group]) -> Html | None:
    drawn = _with_and_without(groups, lambda group: _series(group, "loss"))
    if not drawn:
        return None
    panels = [
        _over_steps(title, lines, linear(_extent(lines), zero=True), "loss", lambda v: f"{v:.3g}") for title, lines in drawn
    ]
    caption = "Training loss."
    if any(len(lines) > 1 for _, lines in drawn):
        caption += " With memory, each anchor has many more pairs, so the values differ by design: compare the shapes instead."
    return figure(panels, caption)


def evaluations(groups: Sequence[Group]) -> Html | None:
    """R@1 during training, if it was measured more than once."""

    def recall_over_steps(group: Group) -> Curve | None:
        pairs = [np.array(run.trace.evaluations, dtype=float).reshape(-1, 2) for run in group.runs]
        return over_seeds([(p[:, 0], 100 * p[:, 1]) for p in pairs])

    drawn = _with_and_without(groups, recall_over_steps)
    if not any(len(line.x) > 1 for _, lines in drawn for line in lines):
        return None
    y = linear(_extent(line for _, lines in drawn for line in lines), most=100)
    panels = [_over_steps(title, lines, y, "R@1, %", lambda v: f"{v:.1f}") for title, lines in drawn]
    return figure(panels, "R@1 at the evaluations during training.")


def negatives(groups: Sequence[Group]) -> Html | None:
    """Valid negatives per step from the batch and from the memory."""
    drawn = _of_memory(
        groups,
        ("from the batch", "without", "valid_negatives_batch"),
        ("from the memory", "with", "valid_negatives_memory"),
    )
    if not drawn:
        return None
    y = counts(_extent(line for _, _, lines in drawn for line in lines))
    panels = [_over_steps(title, lines, y, "valid negatives per step", count, _sources(group)) for title, group, lines in drawn]
    return figure(
        panels, "Negatives with a non-zero gradient, per step (the paper’s Figure 4). The axis is logarithmic above 1."
    )


def drift(groups: Sequence[Group]) -> Html | None:
    """How far embeddings move within 10, 100 and 1000 steps."""
    drawn = _of_memory(groups, *((f"Δt = {delta:,}", f"drift-{delta}", f"drift_{delta}") for delta in (10, 100, 1000)))
    if not drawn:
        return None
    y = linear(_extent(line for _, _, lines in drawn for line in lines), zero=True)
    panels = [_over_steps(title, lines, y, "drift", distance, _slows(group, lines)) for title, group, lines in drawn]
    caption = (
        "Mean squared distance between an image’s embedding now and Δt steps ago (the paper’s Figure 3); for unit vectors it "
        "is at most 4. The lower the lines, the longer an embedding in the memory stays valid."
    )
    return figure(panels, caption)


# ------------------------------------------------------------------ from groups to lines


def _with_and_without(groups: Sequence[Group], curve_of: Callable[[Group], Curve | None]) -> list[tuple[str, list[Line]]]:
    """(title, lines without and with memory) for each loss and reduction."""
    panels = []
    for members in together(groups):
        known = _known(members, curve_of)
        if known:
            panels.append((_title(members), _lines(known)))
    return panels


def _known(groups: Sequence[Group], curve_of: Callable[[Group], Curve | None]) -> list[tuple[Group, Curve]]:
    """The groups that have a curve, with their curves."""
    return [(group, curve) for group in groups if (curve := curve_of(group)) is not None]


def _of_memory(groups: Sequence[Group], *sources: tuple[str, str, str]) -> list[tuple[str, Group, list[Line]]]:
    """(title, group, lines) for each group with memory, or for each group if none has one.

    Args:
        sources: (name in the legend, color, series) of each line.
    """
    drawn = []
    for group in [group for group in groups if group.memory] or groups:
        curves = [(name, colour, _series(group, series)) for name, colour, series in sources]
        lines = [_line(name, group, curve, colour=colour) for name, colour, curve in curves if curve is not None]
        if lines:
            drawn.append((group, lines))
    titles = [_title([group]) for group, _ in drawn]
    if len(set(titles)) < len(titles):
        titles = [group.label for group, _ in drawn]
    return [(title, group, lines) for title, (group, lines) in zip(titles, drawn)]


def _lines(curves: Sequence[tuple[Group, Curve]], scale: float = 1) -> list[Line]:
    """Lines of one panel, with the shortest names that distinguish them."""
    groups = [group for group, _ in curves]
    short = ["with memory" if group.memory else "without" for group in groups]
    names = short
    if len(set(names)) < len(groups):
        names = [f"{group.reduction}, {name}" for group, name in zip(groups, short)]
    if len(set(names)) < len(groups):
        names = [group.label for group in groups]
    dashes = [short[:i].count(name) for i, name in enumerate(short)]
    return [_line(name, group, curve, scale, dash=min(dash, 2)) for name, (group, curve), dash in zip(names, curves, dashes)]


def _line(name: str, group: Group, curve: Curve, scale: float = 1, colour: str = "", dash: int = 0) -> Line:
    low, high = (scale * curve.low, scale * curve.high) if len(group.runs) > 1 else (None, None)
    return Line(name, colour or group.side, curve.x, scale * curve.mean, low, high, dash)


def _series(group: Group, key: str) -> Curve | None:
    return over_seeds([(run.trace.step, getattr(run.trace, key)) for run in group.runs])


def _over_steps(
    title: str, lines: Sequence[Line], y: Scale, y_title: str, read_y: Callable[[float], str], below: str = ""
) -> Html:
    """A panel of lines over the training steps."""
    x = linear([v for line in lines for v in (line.x[0], line.x[-1])], zero=True, snug=True)
    axes = Axes(x, y, "step", y_title, lambda v: f"step {v:,.0f}", read_y)
    return panel(title, lines, axes, _summary(title, lines), below)


def _extent(lines: Iterable[Line]) -> list[float]:
    """All values that an axis must include."""
    return [v for line in lines for values in (line.y, line.low, line.high) if values is not None for v in values.tolist()]


# ------------------------------------------------------------------ words


def _title(groups: Sequence[Group]) -> str:
    reductions = dict.fromkeys(group.reduction for group in groups if group.reduction)
    return ", ".join([loss_name(groups[0].loss), *([" and ".join(reductions)] if reductions else [])])


def _summary(title: str, lines: Sequence[Line]) -> str:
    """What a screen reader says instead of the chart."""
    ends = [f"{line.name} from {y[0]:.3g} to {y[-1]:.3g}" for line in lines if len(y := line.y[line.known])]
    return f"{title}: {listed(ends)}." if ends else title


def _sources(group: Group) -> str:
    batch, memory = group.settled("valid_negatives_batch"), group.settled("valid_negatives_memory")
    if math.isnan(batch) or math.isnan(memory):
        return ""
    ratio = f", {times(memory / batch)} as many" if batch > 0 and memory > batch else ""
    return f"Last quarter: {count(batch)} per step from the batch and {count(memory)} from the memory{ratio}."


def _slows(group: Group, lines: Sequence[Line]) -> str:
    line = max(lines, key=lambda one: (one.colour == "drift-100", -len(one.name)))
    known = line.y[line.known]
    late = group.settled(line.colour.replace("-", "_"))
    if len(known) < 4 or math.isnan(late):
        return ""
    peak = float(known.max())
    if late < 0.8 * peak:
        return f"{line.name}: down from a peak of {distance(peak)} to {distance(late)} in the last quarter."
    return f"{line.name}: {distance(late)} in the last quarter, not much below its peak of {distance(peak)}."
