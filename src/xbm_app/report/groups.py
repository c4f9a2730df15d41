"""What a report shows: runs as plain data, seeds of one setting as a group, groups with and without memory compared.

Nothing here depends on training, so a page can be made from any runs. The mean and its standard error are computed here for
the report, the demo and the paper.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Union

import numpy as np

from xbm.errors import InputError, unknown

if TYPE_CHECKING:
    from PIL import Image

Picture = Union["Image.Image", np.ndarray]  # a PIL image, or (H, W) or (H, W, 3) uint8

SERIES = ("loss", "valid_negatives_batch", "valid_negatives_memory", "drift_10", "drift_100", "drift_1000")
SEVERITIES = ("info", "warning", "error")
BINS = 150  # about one point for every three pixels of a chart

# ------------------------------------------------------------------ statistics over seeds


@dataclass(frozen=True)
class Stat:
    """A mean over seeds with its standard error, which is NaN for a single seed."""

    mean: float
    error: float
    count: int

    @property
    def half_width(self) -> float:
        """Half of its 95 % interval by Student's t, which for three seeds is 4.3 standard errors; NaN for a single seed."""
        return math.nan if math.isnan(self.error) else t_quantile(0.975, self.count - 1) * self.error


@cache
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t distribution.

    Example:
        >>> round(t_quantile(0.975, 2), 2), round(t_quantile(0.975, 4), 2)
        (4.3, 2.78)
    """
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of at least one value, and its standard error (NaN for a single value).

    Example:
        >>> mean_and_error([1.0, 2.0, 3.0])
        (2.0, 0.577...)
    """
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    return mean, (sum((v - mean) ** 2 for v in values) / (n - 1) / n) ** 0.5


def summarize(values: Iterable[float]) -> Stat:
    """Mean and standard error of the finite values; NaN if there are none.

    Example:
        >>> summarize([1.0, float("nan"), 2.0, 3.0])
        Stat(mean=2.0, error=0.577..., count=3)
    """
    finite = [float(v) for v in values if math.isfinite(v)]
    return Stat(*mean_and_error(finite), len(finite)) if finite else Stat(math.nan, math.nan, 0)


# ------------------------------------------------------------------ series of several seeds as one curve


@dataclass(frozen=True, eq=False)
class Curve:
    """A series averaged over seeds.

    Attributes:
        x: (B,) mean step of each bin.
        mean: (B,) mean over the seeds with a value in the bin, NaN if there is none.
        low: (B,) lowest seed.
        high: (B,) highest seed.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def over_seeds(series: Iterable[tuple[np.ndarray, np.ndarray]], bins: int = BINS) -> Curve | None:
    """Averages the (steps, values) of each seed in bins of steps; returns None if no value is finite."""
    pairs = [(np.asarray(s, dtype=float), np.asarray(v, dtype=float)) for s, v in series if len(v)]
    pairs = [(s, v) for s, v in pairs if np.isfinite(v).any()]
    if not pairs:
        return None
    steps = np.unique(np.concatenate([s for s, _ in pairs]))
    edges = steps[:: -(-len(steps) // bins)]  # equally many steps per bin, otherwise adjacent bins differ in noise
    table = np.ma.masked_invalid([_bin_means(s, v, edges) for s, v in pairs])  # (seeds, bins)
    mean, low, high = (over.filled(np.nan) for over in (table.mean(axis=0), table.min(axis=0), table.max(axis=0)))
    return Curve(_bin_means(steps, steps, edges), mean, low, high)


def _bin_means(step: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    finite = np.isfinite(values)
    place = np.searchsorted(edges, step[finite], side="right") - 1
    total = np.bincount(place, weights=values[finite], minlength=len(edges))
    count = np.bincount(place, minlength=len(edges))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# ------------------------------------------------------------------ runs, groups and comparisons


def _empty() -> np.ndarray:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Match:
    """An image with its similarity to a query or an anchor.

    Attributes:
        correct: whether it has the query's class; False for negatives.
    """

    picture: Picture
    similarity: float
    correct: bool = False


@dataclass(frozen=True, eq=False)
class Query:
    """A query and what the run retrieves for it, nearest first.

    Attributes:
        key: name of the query image, the same in every run, so that runs can be shown side by side.
    """

    key: str
    picture: Picture
    results: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Mined:
    """An anchor of a training step with its valid negatives from the batch and from the memory, most similar first."""

    anchor: Picture
    positive: Picture | None
    batch: Sequence[Match]
    memory: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Doubtful:
    """A training image that is likely mislabeled.

    Attributes:
        key: name of the image.
        label: the class of its label.
        nearest: the class of its nearest images.
        own: the most similar images of class `label`.
        other: the most similar images of class `nearest`.
    """

    key: str
    picture: Picture
    label: str
    nearest: str
    own: Sequence[Match]
    other: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Trace:
    """What a run measured during training. Each series is empty or as long as `step`, with NaN where nothing was measured.

    Attributes:
        step: (T,) iteration of each entry.
        valid_negatives_batch: (T,) negatives from the batch with a non-zero gradient, per step.
        valid_negatives_memory: (T,) the same from the memory.
        drift_10: (T,) mean ‖f(x; θ_t) − f(x; θ_{t−10})‖²; likewise `drift_100` and `drift_1000`.
        evaluations: (step, recall@1 as a fraction).
    """

    step: np.ndarray = field(default_factory=_empty)
    loss: np.ndarray = field(default_factory=_empty)
    valid_negatives_batch: np.ndarray = field(default_factory=_empty)
    valid_negatives_memory: np.ndarray = field(default_factory=_empty)
    drift_10: np.ndarray = field(default_factory=_empty)
    drift_100: np.ndarray = field(default_factory=_empty)
    drift_1000: np.ndarray = field(default_factory=_empty)
    evaluations: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        for name in SERIES:
            length = len(getattr(self, name))
            if length not in (0, len(self.step)):
                raise InputError(f"{name} must be empty or have one value per step ({len(self.step)}), got {length} values")


@dataclass(frozen=True, eq=False)
class RunView:
    """One run, ready to be shown. Runs with the same `group` are seeds of one setting and are averaged.

    Attributes:
        name: name of the run, e.g. its folder.
        group: label of the setting, e.g. "contrastive, mean, with memory".
        loss: e.g. "contrastive". Groups of one loss with and without memory are compared.
        reduction: "mean", "sum" or "balanced", or "" if the loss has no choice.
        memory: whether the run was trained with a memory.
        seed: runs with the same seed share data and initial weights, so differences are taken per seed.
        recall: fractions by name: "recall@1", "recall@2", ..., "map@r". Empty for an unfinished run.
        curve: recall@K for K = 1, 2, ..., K_max, as fractions.
        seconds: wall-clock time of training.
        iterations: number of training steps.
        trace: what was measured during training.
        queries: up to 24 queries with up to 8 results each are shown; if there are more, a subset from the whole list.
        chosen: how `queries` were chosen, as a sentence. The page computes no statistic over them, because a choice by outcome
            would bias it.
        right: (Q,) bool, for every query that the run was scored on: whether the nearest image has its class.
        mined: up to 12 anchors are shown.
        doubtful: up to 12 images are shown.
        notes: (severity, sentence) of the run's own warnings; severity is "info", "warning" or "error".
        data: what was searched, as the end of "Recall on ...", e.g. "glyphs, 180 unseen classes, 2,880 images".
        config: the settings to show.
        command: the command line of the run.
        versions: software versions by name.
    """

    name: str
    group: str
    loss: str
    memory: bool
    seed: int
    reduction: str = ""
    recall: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[float] = ()
    seconds: float = float("nan")
    iterations: int = 0
    trace: Trace = field(default_factory=Trace)
    queries: Sequence[Query] = ()
    chosen: str = ""
    right: np.ndarray = field(default_factory=_empty)
    mined: Sequence[Mined] = ()
    doubtful: Sequence[Doubtful] = ()
    notes: Sequence[tuple[str, str]] = ()
    data: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for severity, _ in self.notes:
            if severity not in SEVERITIES:
                raise unknown("severity of a note", severity, SEVERITIES)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed."""

    label: str
    loss: str
    reduction: str
    memory: bool
    runs: tuple[RunView, ...]

    @property
    def side(self) -> str:
        """ "with" or "without" memory: also the class in the style sheet that colors the group."""
        return "with" if self.memory else "without"

    def stat(self, value: Callable[[RunView], float]) -> Stat:
        return summarize(value(run) for run in self.runs)

    def metric(self, name: str) -> Stat:
        return self.stat(lambda run: run.recall.get(name, math.nan))

    @cached_property
    def recall_at_1(self) -> Stat:
        return self.metric("recall@1")

    @cached_property
    def recall_by_seed(self) -> dict[int, float]:
        """R@1 of each seed that has a result."""
        return {run.seed: r for run in self.runs if math.isfinite(r := run.recall.get("recall@1", math.nan))}

    @cached_property
    def seconds_per_iteration(self) -> Stat:
        return self.stat(lambda run: run.seconds / run.iterations if run.iterations else math.nan)

    def settled(self, series: str) -> float:
        """The median of a series over the last quarter of training, averaged over seeds; NaN if nothing was measured."""
        return self.stat(lambda run: _last_quarter(run.trace.step, getattr(run.trace, series))).mean


@dataclass(frozen=True, eq=False)
class Comparison:
    """The best setting without memory against the best one with memory, for one loss.

    Attributes:
        gain: R@1 with memory minus R@1 without. Its standard error is that of the differences per seed if both sides ran the
            same seeds, otherwise that of two independent means.
    """

    loss: str
    without: Group
    with_memory: Group
    gain: Stat

    @property
    def outcome(self) -> str:
        """ "gain" or "loss" if the 95 % interval excludes 0, "same" if not, "single" if one seed gives no interval."""
        if math.isnan(self.gain.error):
            return "single"
        if abs(self.gain.mean) <= max(self.gain.half_width, 0.0005):  # a difference below the printed precision is none
            return "same"
        return "gain" if self.gain.mean > 0 else "loss"


def group_runs(runs: Sequence[RunView]) -> list[Group]:
    """Groups in the order in which their losses first occur, without memory before with memory."""
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
    """One comparison per loss that ran with and without memory; each side is represented by its best group."""
    comparisons = []
    for loss in dict.fromkeys(group.loss for group in groups):
        without, with_memory = best(groups, loss, memory=False), best(groups, loss, memory=True)
        if without is not None and with_memory is not None:
            comparisons.append(Comparison(loss, without, with_memory, difference(without, with_memory)))
    return comparisons


def together(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups that share a panel: those of one loss and reduction.

    A group with memory whose reduction was not run without memory joins the best group of its loss without memory.
    """
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alone = not any((g.loss, g.reduction, g.memory) == (group.loss, group.reduction, False) for g in groups)
        base = best(groups, group.loss, memory=False) if group.memory and alone else None
        kinds.setdefault((group.loss, group.reduction if base is None else base.reduction), []).append(group)
    return list(kinds.values())


def best(groups: Iterable[Group], loss: str, memory: bool) -> Group | None:
    """The group with the highest mean R@1, several seeds before a single one; None if no run has a result."""
    finished = [g for g in groups if g.loss == loss and g.memory == memory and g.recall_at_1.count]
    return max(finished, key=lambda g: (g.recall_at_1.count > 1, g.recall_at_1.mean), default=None)


def difference(a: Group, b: Group) -> Stat:
    """R@1 of `b` minus R@1 of `a`."""
    x, y = a.recall_at_1, b.recall_at_1
    per_seed_a, per_seed_b = a.recall_by_seed, b.recall_by_seed
    distinct = len(per_seed_a) == x.count and len(per_seed_b) == y.count  # no seed ran twice
    if per_seed_a and per_seed_a.keys() == per_seed_b.keys() and distinct:
        return summarize(per_seed_b[seed] - per_seed_a[seed] for seed in per_seed_a)
    return Stat(y.mean - x.mean, math.hypot(x.error, y.error), min(x.count, y.count))


def _group(label: str, runs: Sequence[RunView]) -> Group:
    kinds = {(run.loss, run.reduction, run.memory) for run in runs}
    if len(kinds) > 1:
        raise InputError(f"group {label!r} mixes runs of different loss, reduction or memory: give each setting its own label")
    loss, reduction, memory = kinds.pop()
    return Group(label, loss, reduction, memory, tuple(sorted(runs, key=lambda run: run.seed)))


def _last_quarter(step: np.ndarray, values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    step, values = np.asarray(step, dtype=float), np.asarray(values, dtype=float)
    late = values[(step >= step.min() + 0.75 * (step.max() - step.min())) & np.isfinite(values)]
    return float(np.median(late)) if len(late) else math.nan
