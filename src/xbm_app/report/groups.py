"""Runs put together: seeds of one setting averaged, settings with and without memory compared."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xbm.errors import InputError
from xbm_app.report.view import RunView


@dataclass(frozen=True)
class Stat:
    """A mean over seeds with its standard error, which one seed alone does not have (NaN)."""

    mean: float
    error: float
    count: int


def over(values: Iterable[float]) -> Stat:
    """Mean and standard error of the finite values.

    Example:
        >>> over([0.5, 0.6, 0.7])
        Stat(mean=0.6, error=0.0577..., count=3)
    """
    x = np.array([v for v in values if math.isfinite(v)], dtype=float)
    if not len(x):
        return Stat(math.nan, math.nan, 0)
    error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return Stat(float(x.mean()), error, len(x))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    loss: str
    reduction: str
    memory: bool
    runs: tuple[RunView, ...]

    def stat(self, of: Callable[[RunView], float]) -> Stat:
        return over(of(run) for run in self.runs)

    def metric(self, name: str) -> Stat:
        return self.stat(lambda run: run.recall.get(name, math.nan))

    @cached_property
    def recall_at_1(self) -> Stat:
        return self.metric("recall@1")

    @cached_property
    def seconds_per_iteration(self) -> Stat:
        return self.stat(lambda run: run.seconds / run.iterations if run.iterations else math.nan)

    def settled(self, series: str) -> float:
        """The median of a series over the last quarter of training, averaged over seeds; NaN where nothing was measured."""
        return self.stat(lambda run: _last_quarter(run.trace.step, getattr(run.trace, series))).mean


@dataclass(frozen=True, eq=False)
class Comparison:
    """The better setting without memory against the better one with it, for one loss.

    Attributes:
        gain: difference of R@1, with minus without. Its error is that of the differences seed by seed where both sides ran
            the same seeds, and otherwise that of two independent means.
    """

    loss: str
    without: Group
    with_memory: Group
    gain: Stat

    @property
    def outcome(self) -> str:
        """ "gain" or "loss" beyond two standard errors, "same" within them, "single" where one seed gives no error."""
        if math.isnan(self.gain.error):
            return "single"
        if abs(self.gain.mean) <= max(2 * self.gain.error, 0.0005):  # less than is printed is no difference
            return "same"
        return "gain" if self.gain.mean > 0 else "loss"


def group_runs(runs: Sequence[RunView]) -> list[Group]:
    """Groups in the order of their losses' first run; those without memory before those with it."""
    if not runs:
        raise InputError("a report needs at least one run")
    by_label: dict[str, list[RunView]] = {}
    for run in runs:
        by_label.setdefault(run.group, []).append(run)
    groups = [_group(label, members) for label, members in by_label.items()]
    losses = list(dict.fromkeys(group.loss for group in groups))
    reductions = list(dict.fromkeys(group.reduction for group in groups))
    return sorted(groups, key=lambda g: (losses.index(g.loss), reductions.index(g.reduction), g.memory))


def compare(groups: Sequence[Group]) -> list[Comparison]:
    """One comparison for each loss that ran both ways; each side is represented by its best group."""
    comparisons = []
    for loss in dict.fromkeys(group.loss for group in groups):
        without, with_memory = best(groups, loss, memory=False), best(groups, loss, memory=True)
        if without is not None and with_memory is not None:
            comparisons.append(Comparison(loss, without, with_memory, difference(without, with_memory)))
    return comparisons


def together(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups that a panel shows beside each other: those of one loss and reduction. One whose reduction ran with memory
    alone stands beside the best of its loss without."""
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alone = not any((g.loss, g.reduction, g.memory) == (group.loss, group.reduction, False) for g in groups)
        base = best(groups, group.loss, memory=False) if group.memory and alone else None
        kinds.setdefault((group.loss, group.reduction if base is None else base.reduction), []).append(group)
    return list(kinds.values())


def best(groups: Iterable[Group], loss: str, memory: bool) -> Group | None:
    """The group with the highest mean R@1, several seeds before a single one; None where no run has a result."""
    able = [g for g in groups if g.loss == loss and g.memory == memory and g.recall_at_1.count]
    return max(able, key=lambda g: (g.recall_at_1.count > 1, g.recall_at_1.mean), default=None)


def difference(a: Group, b: Group) -> Stat:
    """R@1 of `b` minus R@1 of `a`."""
    of_a, of_b = _by_seed(a), _by_seed(b)
    if of_a and of_a.keys() == of_b.keys() and len(of_a) == a.recall_at_1.count and len(of_b) == b.recall_at_1.count:
        return over(of_b[seed] - of_a[seed] for seed in of_a)
    x, y = a.recall_at_1, b.recall_at_1
    return Stat(y.mean - x.mean, math.hypot(x.error, y.error), min(x.count, y.count))


def _by_seed(group: Group) -> dict[int, float]:
    return {run.seed: run.recall["recall@1"] for run in group.runs if math.isfinite(run.recall.get("recall@1", math.nan))}


def _group(label: str, runs: Sequence[RunView]) -> Group:
    kinds = {(run.loss, run.reduction, run.memory) for run in runs}
    if len(kinds) > 1:
        raise InputError(f"group {label!r} holds runs of different loss, reduction or memory: give each setting its own label")
    loss, reduction, memory = kinds.pop()
    return Group(label, loss, reduction, memory, tuple(sorted(runs, key=lambda run: run.seed)))


def _last_quarter(step: np.ndarray, values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    step, values = np.asarray(step, dtype=float), np.asarray(values, dtype=float)
    late = values[(step >= step.min() + 0.75 * (step.max() - step.min())) & np.isfinite(values)]
    return float(np.median(late)) if len(late) else math.nan
