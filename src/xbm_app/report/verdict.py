"""What the data say, in sentences. Every clause is conditional on the figures it quotes."""

import math
from collections.abc import Sequence

from xbm_app.report.groups import Comparison, Group, difference
from xbm_app.report.wording import count, listed, named, percent, plus_minus, seeds

COLLAPSE = 0.5  # of the R@1 without memory: below, "falls" is too weak a word


def verdict(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> str:
    """One sentence: what the memory did to R@1; without a comparison, what was reached."""
    if not comparisons:
        return _reached(groups)
    clauses = []
    for outcome, verb in (("gain", "lifts"), ("single", "moves"), ("loss", "lowers")):
        told = [_from_to(c) for c in comparisons if c.outcome == outcome]
        if told:
            clauses.append(f"{verb} R@1 {listed(told)}")
    same = [_within(c) for c in comparisons if c.outcome == "same"]
    if same:
        clauses.append(f"makes no clear difference to R@1 {listed(same)}")
    return f"The memory {'; it '.join(clauses)}."


def _from_to(c: Comparison) -> str:
    a, b = percent(c.without.recall_at_1.mean), percent(c.with_memory.recall_at_1.mean)
    return f"from {a} to {b} for {named(c.loss)} ({_gain(c)})"


def _within(c: Comparison) -> str:
    a, b = percent(c.without.recall_at_1.mean), percent(c.with_memory.recall_at_1.mean)
    return f"for {named(c.loss)} ({a} without, {b} with: {_gain(c)})"


def _gain(c: Comparison) -> str:
    tail = "one seed, so no error bar" if c.outcome == "single" else seeds(c.gain.count)
    return f"{plus_minus(c.gain, sign=True)}, {tail}"


def _reached(groups: Sequence[Group]) -> str:
    able = [group for group in groups if group.recall_at_1.count]
    if not able:
        return "No run has a result yet."
    top = max(able, key=lambda group: group.recall_at_1.mean)
    stat = top.recall_at_1
    if len(groups) > 1:
        return f"The best of {len(groups)} settings is {top.label}, with R@1 {plus_minus(stat)} ({seeds(stat.count)})."
    after = f" after {top.runs[0].iterations:,} iterations" if top.runs[0].iterations else ""
    return f"R@1 is {plus_minus(stat)}{after}: {top.label}, {seeds(stat.count)}."


def left_out(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    """Names every setting without memory that did better than the one its loss is compared with, because it has more seeds."""
    return [
        f"Not compared, because {seeds(group.recall_at_1.count)} cannot show an error: {group.label}, "
        f"R@1 {percent(group.recall_at_1.mean)}."
        for c in comparisons
        for group in groups
        if group.loss == c.loss and not group.memory and group.recall_at_1.mean > c.without.recall_at_1.mean
    ]


LEVEL = {
    "balanced": ("Balanced, so that the push never outweighs the pull,", "balance"),
    "mean": ("Averaged over pairs,", "mean"),
}


def reductions(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) for each loss whose sum falls below its baseline with the memory while another form does not."""
    passages = []
    for loss in dict.fromkeys(group.loss for group in groups):
        of_loss = {(g.reduction, g.memory): g for g in groups if g.loss == loss and g.recall_at_1.count}
        summed, level = of_loss.get(("sum", True)), of_loss.get(("balanced", True)) or of_loss.get(("mean", True))
        base = of_loss.get(("sum", False)) or of_loss.get(("mean", False))
        if summed and level and base and _falls(base, summed) and not _falls(of_loss.get(("mean", False)) or base, level):
            passages.append(_why(loss, base, summed, level))
    return passages


def _falls(base: Group, group: Group) -> bool:
    change = difference(base, group)
    noise = 0.0 if math.isnan(change.error) else 2 * change.error
    return change.mean < -max(noise, 0.02)


def _why(loss: str, base: Group, summed: Group, level: Group) -> tuple[str, list[str]]:
    collapsed = summed.recall_at_1.mean < COLLAPSE * base.recall_at_1.mean
    verb = "collapses" if collapsed else "falls"
    how, short = LEVEL[level.reduction]
    seen = (
        f"Summed over pairs, {named(loss)} {verb} when the memory joins in: R@1 {plus_minus(summed.recall_at_1)} against "
        f"{plus_minus(base.recall_at_1)} without memory. {how} it reaches {plus_minus(level.recall_at_1)} with the same memory."
    )
    return f"Why the sum {verb} and the {short} does not ({named(loss)})", [seen, _cause(summed)]


def _cause(summed: Group) -> str:
    batch, memory = summed.settled("valid_negatives_batch"), summed.settled("valid_negatives_memory")
    from_batch = "" if math.isnan(batch) else f" and {count(batch)} from its batch"
    if not math.isnan(memory) and memory < 10 * max(1.0, 0.0 if math.isnan(batch) else batch):
        return (
            f"The usual cause, negatives by the thousand, does not show here: a step saw {count(memory)} valid ones from the "
            f"memory{from_batch} late in training. Look at the loss curves and at what the runs said about themselves."
        )
    if math.isnan(memory):
        many = "With the sum, every valid negative of the memory counts as much as one of the batch"
    else:
        many = f"With the sum, a step late in training saw {count(memory)} valid negatives from the memory{from_batch}"
    return (
        f"{many}, against a handful of positives for each anchor. Added up, the push of so many outweighs the pull of so few, "
        "and nothing draws a class together any more. Where classes are large and a pretrained net tells most images apart "
        "from the start, the two sides are about level and the sum does no harm: this is a finding about these runs."
    )
