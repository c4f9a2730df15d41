"""Statistics over seeds, and one way of writing each kind of number.

The mean and its standard error are computed here for the report, the demo and the paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

MISSING = "–"
BINS = 150  # about one point for every three pixels of a chart


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


# ------------------------------------------------------------------ how numbers are written


def percent(fraction: float) -> str:
    """A fraction in percent, without the percent sign: 0.6684 is "66.8"."""
    return MISSING if math.isnan(fraction) else f"{100 * fraction:.1f}".replace("-", "−")


def signed(fraction: float) -> str:
    """A difference of fractions in percentage points: "+5.6", "−0.3"."""
    return f"{100 * fraction:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def plus_minus(stat: Stat, sign: bool = False) -> str:
    """ "66.8 ± 0.4", or "66.8" if there is no standard error."""
    return (signed(stat.mean) if sign else percent(stat.mean)) + error_bar(stat)


def error_bar(stat: Stat) -> str:
    """ " ± 0.4" in percentage points, never rounded to zero; empty if there is no standard error."""
    if math.isnan(stat.error):
        return ""
    digits = ".1f" if stat.error >= 0.0005 or stat.error == 0 else ".1g"
    return f" ± {100 * stat.error:{digits}}"


def seeds(count: int) -> str:
    """ "one seed", "3 seeds"."""
    return "one seed" if count == 1 else f"{count} seeds"


def count(value: float) -> str:
    """A number of pairs: whole from 10 upwards, otherwise with two significant digits."""
    if math.isnan(value):
        return MISSING
    if value >= 9.95 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def times(ratio: float) -> str:
    """A ratio in words: "310 times", "1.4 times"."""
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 0.0413 is "41.3 ms", 90 is "90.0 s", 5400 is "1 h 30 min"."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 300:
        value, unit = (1000 * seconds, "ms") if seconds < 1 else (seconds, "s")
        return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}" if value >= 0.95 else f"{value:.1g} {unit}"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def change(before: float, after: float) -> str:
    """A relative change in percent, with its sign: "+17 %"."""
    return f"{100 * (after / before - 1):+.0f}\u00a0%".replace("-", "−")


def distance(value: float) -> str:
    """A squared distance between unit vectors."""
    return MISSING if math.isnan(value) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def loss_name(loss: str) -> str:
    """A loss as people write it: "multi_similarity" is "multi similarity", "ms" is "MS"."""
    return loss.upper() if len(loss) < 3 else loss.replace("_", " ")


def metric_title(name: str) -> str:
    """A metric as tables write it: "recall@1" is "R@1", "map@r" is "MAP@R"."""
    if name in ("r_precision", "map"):
        return {"r_precision": "R-precision", "map": "mAP"}[name]
    return f"R@{name.removeprefix('recall@')}" if name.startswith("recall@") else name.upper()


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
