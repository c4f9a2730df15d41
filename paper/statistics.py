"""Tests of a difference between two ways to train: t tests over seeds, a bootstrap over test classes, and Holm's correction.

Scores are fractions by seed. Where a seed fixes the head and the order of the batches in both arms, their differences are
paired; otherwise the test is Welch's. Both have few degrees of freedom: with three pairs, a 95 % interval is 4.3 standard
errors on either side, with five it is 2.8.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from xbm.errors import InputError
from xbm_app.report.groups import mean_and_error, t_quantile
from xbm_app.report.writing import seeds

Name = TypeVar("Name", bound=Hashable)  # of a hypothesis

LEVEL = 0.95
DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True)
class Gain:
    """A difference of two means, other minus one.

    Attributes:
        error: its standard error; NaN if too few seeds give none.
        freedom: degrees of freedom of its t distribution.
        seeds: number of pairs, or of the smaller side.
        paired: whether the test is paired, otherwise Welch's.
    """

    mean: float
    error: float
    freedom: float
    seeds: int
    paired: bool = True

    @property
    def tested(self) -> bool:
        """Whether there are enough seeds for a test."""
        return not math.isnan(self.error)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The confidence interval of the difference."""
        half = t_quantile(0.5 + level / 2, self.freedom) * self.error if self.tested else math.nan
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference; NaN without a test."""
        return 2 * _tail(abs(self.mean), self.error, self.freedom)

    @property
    def sign(self) -> int:
        """1 if the 95 % interval lies above 0, −1 if below, 0 if it includes 0 or there is no test."""
        low, high = self.interval()
        return 1 if low > 0 else -1 if high < 0 else 0


def paired_gain(one: Mapping[int, float], other: Mapping[int, float]) -> Gain | None:
    """The mean of the differences of the seeds that both have, or None if they share none.

    Example:
        >>> gain = paired_gain({0: 0.50, 1: 0.51, 2: 0.52}, {0: 0.54, 1: 0.56, 2: 0.58, 3: 0.99})
        >>> round(gain.mean, 3), gain.seeds, round(gain.p, 4)
        (0.05, 3, 0.0131)
    """
    differences = [other[seed] - score for seed, score in one.items() if seed in other]
    if not differences:
        return None
    return Gain(*mean_and_error(differences), freedom=len(differences) - 1, seeds=len(differences))


def welch_gain(one: Sequence[float], other: Sequence[float]) -> Gain | None:
    """The difference of two independent means (variances may differ), or None if a side is empty."""
    if not one or not other:
        return None
    (mean_one, error_one), (mean_other, error_other) = mean_and_error(one), mean_and_error(other)
    error = math.hypot(error_one, error_other)
    freedom = math.nan
    if not math.isnan(error):
        parts = error_one**4 / (len(one) - 1) + error_other**4 / (len(other) - 1)
        freedom = error**4 / parts if parts else math.inf
    return Gain(mean_other - mean_one, error, freedom, min(len(one), len(other)), paired=False)


def equivalence_p(gain: Gain, margin: float = 0.01) -> float:
    """p-value of two one-sided tests that the difference lies within ±margin: a small one says that nothing changed.

    At 5 %, this is the same as a 90 % interval within the margin.
    """
    if margin <= 0:
        raise InputError(f"margin must be positive, got {margin}")
    return max(_tail(distance, gain.error, gain.freedom) for distance in (margin - gain.mean, margin + gain.mean))


def holm(p_values: Mapping[Name, float], family: int | None = None) -> dict[Name, float]:
    """Holm's adjusted p-values.

    Args:
        p_values: by hypothesis.
        family: number of hypotheses that were declared, if some are not tested yet; those count as p = 1.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    count = len(p_values) if family is None else family
    if count < len(p_values):
        raise InputError(f"family must be at least the number of p-values, {len(p_values)}, got {count}")
    adjusted, largest = dict[Name, float](), 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (count - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def class_bootstrap(
    one: np.ndarray, other: np.ndarray, labels: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the gain in R@1 over other test classes than those at hand: classes are drawn with replacement, each
    with all its queries. Seeds are not drawn, and what a query retrieves stays as it is.

    Args:
        one: (seeds, queries) hits at rank 1 of one arm, booleans.
        other: (seeds, queries) those of the other arm, for the same queries.
        labels: (queries,) class of each query.
    """
    if one.shape[1:] != labels.shape or other.shape[1:] != labels.shape:
        raise InputError(f"hits must have one column per query: got {one.shape}, {other.shape} and {labels.shape} labels")
    classes, of_query = np.unique(labels, return_inverse=True)
    gains = other.mean(0) - one.mean(0)  # (queries,)
    sums, sizes = np.bincount(of_query, gains), np.bincount(of_query)  # (classes,)
    share = np.full(len(classes), 1 / len(classes))
    drawn = np.random.default_rng(seed).multinomial(len(classes), share, size=draws)  # (draws, classes)
    low, high = np.quantile((drawn @ sums) / (drawn @ sizes), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _tail(distance: float, error: float, freedom: float) -> float:
    """P(T > distance / error), the upper tail of Student's t; NaN without an error."""
    from scipy.special import ndtr, stdtr

    if math.isnan(error):
        return math.nan
    if error == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    t = distance / error
    return float(ndtr(-t) if math.isinf(freedom) else stdtr(freedom, -t))


# ------------------------------------------------------------------ how they are written


def p_value(p: float) -> str:
    """ "p < 0.001" or "p = 0.012", with two significant digits.

    Example:
        >>> p_value(0.0123), p_value(0.00004), p_value(0.5)
        ('p = 0.012', 'p < 0.001', 'p = 0.5')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def points(fraction: float) -> str:
    """A difference in percentage points, with its sign: "+4.7"."""
    return f"{100 * fraction:+.1f}".replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0")


def between(interval: tuple[float, float]) -> str:
    """An interval in percentage points: "+2.7 to +6.8"."""
    return " to ".join(map(points, interval))


def in_words(gain: Gain) -> str:
    """ "+4.7 points (95 % interval +2.3 to +7.0, p = 0.0051, 5 seeds)"; a single seed has no interval.

    Example:
        >>> in_words(Gain(0.05, 0.01, 2, 3))
        '+5.0 points (95 % interval +0.7 to +9.3, p = 0.038, 3 seeds)'
    """
    count = seeds(gain.seeds)
    if not gain.tested:
        return f"{points(gain.mean)} points ({count}, so there is no interval)"
    kind = "" if gain.paired else ", Welch"
    return f"{points(gain.mean)} points (95 % interval {between(gain.interval())}, {p_value(gain.p)}{kind}, {count})"
