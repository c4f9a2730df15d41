"""Axes: where a value lies between the ends of an axis, and which values get a tick."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _zero_then_log(values: np.ndarray) -> np.ndarray:
    return np.where(values <= 1, values, 1 + np.log10(np.maximum(values, 1)))


@dataclass(frozen=True, eq=False)
class Scale:
    """An axis from `low` to `high`; `warp` makes equal steps on paper out of its values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    warp: Callable[[np.ndarray], np.ndarray] = _same

    def place(self, values: np.ndarray, start: float, end: float) -> np.ndarray:
        """Positions between `start` (for `low`) and `end` (for `high`)."""
        low, high = self.warp(np.array([self.low, self.high], dtype=float))
        share = (self.warp(np.asarray(values, dtype=float)) - low) / (high - low)
        return start + share * (end - start)


def linear(values: Iterable[float], zero: bool = False, snug: bool = False, ticks: int = 5) -> Scale:
    """Even steps. `zero` includes it; `snug` ends at the outermost values rather than at the ticks beyond them."""
    low, high = _range(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(high) / 10 or 0.5
        low, high = low - (0 if zero and low >= 0 else room), high + room
    step = _nice((high - low) / ticks)
    if not snug:
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    inside = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, tuple(round(i * step, 12) for i in inside))


def ranks(largest: int) -> Scale:
    """K = 1 ... largest on a logarithmic axis, ticks at powers of two, or of ten where there would be too many."""
    largest = max(2, largest)
    base = 2 if largest <= 256 else 10
    return Scale(1, largest, tuple(float(base**i) for i in range(int(math.log(largest, base) + 1e-9) + 1)), np.log)


def counts(values: Iterable[float]) -> Scale:
    """Counts on a logarithmic axis that still has a zero: even up to 1, decades above."""
    _, high = _range(values)
    decades = max(1, math.ceil(math.log10(max(high, 1)) - 1e-9))
    return Scale(0, 10.0**decades, (0.0, *(10.0**i for i in range(decades + 1))), _zero_then_log)


def label(value: float) -> str:
    """A tick's text: as many digits as it needs, thousands separated, from ten thousand on in k and M.

    Example:
        >>> [label(v) for v in (0, 0.25, 64, 1500, 10000, 2500000)]
        ['0', '0.25', '64', '1,500', '10k', '2.5M']
    """
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit or (name == "M" and abs(value) >= unit):
            return f"{value / unit:.4g}{name}".replace("-", "−")
    return (f"{value:,.0f}" if value == round(value) else f"{value:.4g}").replace("-", "−")


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [float(v) for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if step <= m * power * (1 + 1e-9))
