"""Series of several seeds as one curve: averaged in bins of steps, with the range that the seeds span."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

BINS = 150  # about one point for every three pixels of a chart


@dataclass(frozen=True, eq=False)
class Curve:
    """Attributes:
    x: (B,) mean step of a bin.
    mean: (B,) mean over the seeds that have a value there, NaN where none has.
    low: (B,) smallest seed; `high` the largest.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def over_seeds(series: Iterable[tuple[np.ndarray, np.ndarray]], bins: int = BINS) -> Curve | None:
    """One curve out of (step, values) of each seed, or None where no value is finite."""
    pairs = [(np.asarray(s, dtype=float), np.asarray(v, dtype=float)) for s, v in series if len(v)]
    pairs = [(s, v) for s, v in pairs if np.isfinite(v).any()]
    if not pairs:
        return None
    steps = np.unique(np.concatenate([s for s, _ in pairs]))
    edges = steps[:: -(-len(steps) // bins)]  # as many steps in every bin, or neighbours would differ in noise
    count = len(edges)
    x = _bin_means(steps, steps, edges, count)
    table = np.stack([_bin_means(s, v, edges, count) for s, v in pairs])  # (seeds, bins)
    known = np.isfinite(table)
    any_known = known.any(axis=0)
    mean = np.full(count, np.nan)
    mean[any_known] = np.where(known, table, 0).sum(axis=0)[any_known] / known.sum(axis=0)[any_known]
    low = np.where(any_known, np.where(known, table, np.inf).min(axis=0), np.nan)
    high = np.where(any_known, np.where(known, table, -np.inf).max(axis=0), np.nan)
    return Curve(x, mean, low, high)


def _bin_means(step: np.ndarray, values: np.ndarray, edges: np.ndarray, count: int) -> np.ndarray:
    finite = np.isfinite(values)
    place = np.searchsorted(edges, step[finite], side="right") - 1
    total = np.bincount(place, weights=values[finite], minlength=count)
    number = np.bincount(place, minlength=count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
