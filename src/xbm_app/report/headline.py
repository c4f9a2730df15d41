"""The top of the report: headline sentence, gains at a glance, the runs' own warnings; and the sentences beside the results.

Every sentence depends on the numbers that it quotes.
"""

import math
from collections.abc import Sequence

from xbm_app.report.groups import SEVERITIES, Comparison, Group, difference
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.statistics import change, count, error_bar, listed, loss_name, percent, plus_minus, seeds, signed

COLLAPSE = 0.5  # below this share of the R@1 without memory, R@1 "collapses"
OUTCOMES = {"gain": "better with memory", "loss": "worse with memory", "same": "no clear difference", "single": "one seed only"}
LEVEL = {
    "balanced": ("With the balanced reduction, whose negatives never outweigh the positives,", "balanced reduction"),
    "mean": ("With the mean", "mean"),
}


def header(title: str, groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html:
    return tag(
        "header",
        tag("h1", title),
        tag("p", headline(groups, comparisons).replace(" ± ", "\u00a0±\u00a0"), class_="verdict"),
        tag("div", *(_card(c) for c in comparisons), class_="cards") if comparisons else None,
        tag("p", _extent(groups), class_="extent"),
    )


def headline(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> str:
    """One sentence: what the memory did to R@1, or what was reached if there is no comparison."""
    if not comparisons:
        return _reached(groups)
    clauses = []
    for outcome, verb in (("gain", "raises"), ("single", "changes"), ("loss", "lowers")):
        changes = [
            f"from {_recall(c.without)} to {_recall(c.with_memory)} for {loss_name(c.loss)} ({_gain(c)})"
            for c in comparisons
            if c.outcome == outcome
        ]
        if changes:
            clauses.append(f"{verb} R@1 {listed(changes)}")
    same = [
        f"for {loss_name(c.loss)} ({_recall(c.without)} without, {_recall(c.with_memory)} with: {_gain(c)})"
        for c in comparisons
        if c.outcome == "same"
    ]
    if same:
        clauses.append(f"makes no clear difference to R@1 {listed(same)}")
    return f"The memory {'; it '.join(clauses)}."


def _recall(group: Group) -> str:
    return percent(group.recall_at_1.mean)


def _gain(c: Comparison) -> str:
    tail = "one seed, so no error bar" if c.outcome == "single" else seeds(c.gain.count)
    return f"{plus_minus(c.gain, sign=True)}, {tail}"


def _reached(groups: Sequence[Group]) -> str:
    finished = [group for group in groups if group.recall_at_1.count]
    if not finished:
        return "No run has a result yet."
    top = max(finished, key=lambda group: group.recall_at_1.mean)
    stat = top.recall_at_1
    if len(groups) > 1:
        return f"The best of {len(groups)} settings is {top.label}, with R@1 {plus_minus(stat)} ({seeds(stat.count)})."
    after = f" after {top.runs[0].iterations:,} iterations" if top.runs[0].iterations else ""
    return f"R@1 is {plus_minus(stat)}{after}: {top.label}, {seeds(stat.count)}."


def _card(c: Comparison) -> Html:
    facts = [f"R@1 {_recall(c.without)} → {_recall(c.with_memory)}"]
    batch, memory = (c.with_memory.settled(f"valid_negatives_{source}") for source in ("batch", "memory"))
    if not math.isnan(batch) and not math.isnan(memory):
        facts.append(f"{count(batch)} + {count(memory)} valid negatives per step, batch + memory")
    a, b = c.without.seconds_per_iteration.mean, c.with_memory.seconds_per_iteration.mean
    if a > 0 and b > 0:
        facts.append(f"{change(a, b)} time per iteration")
    return tag(
        "div",
        tag("h2", loss_name(c.loss)),
        tag("p", signed(c.gain.mean), tag("small", error_bar(c.gain)), tag("span", " points"), class_="points"),
        tag("p", OUTCOMES[c.outcome], class_="outcome"),
        tag("ul", *(tag("li", fact) for fact in facts)),
        class_=f"card {c.outcome}",
    )


def _extent(groups: Sequence[Group]) -> Html:
    """How many runs, seeds and iterations, and on which data."""
    runs = [run for group in groups for run in group.runs]
    parts = [f"{len(runs)} runs" if len(runs) > 1 else "1 run"]
    if len(runs) > 1:
        parts.append(seeds(len({run.seed for run in runs})))
    lengths = {run.iterations for run in runs}
    if len(lengths) == 1 and (length := lengths.pop()):
        parts.append(f"{length:,} iterations each" if len(runs) > 1 else f"{length:,} iterations")
    data = list(dict.fromkeys(run.data for run in runs if run.data))
    return join([" · ".join(parts + data)])


def notes(groups: Sequence[Group]) -> Html | None:
    """The runs' own warnings, most severe first; one that several runs share is shown once, with their names."""
    by_note: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            for severity, sentence in run.notes:
                by_note.setdefault((severity, sentence), {}).setdefault(group.label, []).append(str(run.seed))
    if not by_note:
        return None
    items = []
    for (severity, sentence), runs in sorted(by_note.items(), key=lambda item: -SEVERITIES.index(item[0][0])):
        names = [f"{label}, {'seeds' if len(s) > 1 else 'seed'} {', '.join(dict.fromkeys(s))}" for label, s in runs.items()]
        items.append(tag("li", tag("b", severity), tag("span", sentence, tag("small", "; ".join(names))), class_=severity))
    return tag("ul", *items, class_="notes")


# ------------------------------------------------------------------ beside the table of results


def left_out(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    """Names each setting without memory that beats the one compared with, but has too few seeds."""
    return [
        f"Not compared, because {seeds(group.recall_at_1.count)} gives no standard error: {group.label}, "
        f"R@1 {percent(group.recall_at_1.mean)}."
        for c in comparisons
        for group in groups
        if group.loss == c.loss and not group.memory and group.recall_at_1.mean > c.without.recall_at_1.mean
    ]


def reductions(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) for each loss that falls below its baseline when summed with memory, but not when averaged."""
    passages = []
    for loss in dict.fromkeys(group.loss for group in groups):
        of_loss = {(g.reduction, g.memory): g for g in groups if g.loss == loss and g.recall_at_1.count}
        summed, level = of_loss.get(("sum", True)), of_loss.get(("balanced", True)) or of_loss.get(("mean", True))
        base = of_loss.get(("sum", False)) or of_loss.get(("mean", False))
        if summed and level and base and _falls(base, summed) and not _falls(of_loss.get(("mean", False)) or base, level):
            passages.append(_why(loss, base, summed, level))
    return passages


def _falls(base: Group, group: Group) -> bool:
    gain = difference(base, group)
    noise = 0.0 if math.isnan(gain.error) else gain.half_width
    return gain.mean < -max(noise, 0.02)


def _why(loss: str, base: Group, summed: Group, level: Group) -> tuple[str, list[str]]:
    collapsed = summed.recall_at_1.mean < COLLAPSE * base.recall_at_1.mean
    verb = "collapses" if collapsed else "falls"
    how, short = LEVEL[level.reduction]
    observation = (
        f"With the sum over pairs, {loss_name(loss)} {verb} when a memory is used: R@1 {plus_minus(summed.recall_at_1)}, and "
        f"{plus_minus(base.recall_at_1)} without memory. {how} it reaches {plus_minus(level.recall_at_1)} with the same memory."
    )
    return f"Why the sum {verb} and the {short} does not ({loss_name(loss)})", [observation, _cause(summed)]


def _cause(summed: Group) -> str:
    batch, memory = summed.settled("valid_negatives_batch"), summed.settled("valid_negatives_memory")
    from_batch = "" if math.isnan(batch) else f" and {count(batch)} from its batch"
    if not math.isnan(memory) and memory < 10 * max(1.0, 0.0 if math.isnan(batch) else batch):
        return (
            f"The usual cause, thousands of negatives, is not visible here: late in training a step had {count(memory)} valid "
            f"negatives from the memory{from_batch}. See the loss curves and the notes from the runs."
        )
    if math.isnan(memory):
        many = "With the sum, each valid negative from the memory counts as much as one from the batch"
    else:
        many = f"With the sum, a step late in training had {count(memory)} valid negatives from the memory{from_batch}"
    return (
        f"{many}, but only a few positives per anchor. In the sum, so many negatives outweigh so few positives, and nothing "
        "pulls the images of a class together any more. If classes are large and a pretrained model separates most images from "
        "the start, both sides are about equal and the sum does no harm: this explanation is about these runs."
    )
