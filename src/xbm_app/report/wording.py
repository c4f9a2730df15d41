"""How figures are written: one way for each kind, everywhere on the page."""

import math
from collections.abc import Sequence

from xbm_app.report.groups import Stat

MISSING = "–"


def percent(fraction: float) -> str:
    """A fraction in percent without its sign: 0.6684 is "66.8"."""
    return MISSING if math.isnan(fraction) else f"{100 * fraction:.1f}".replace("-", "−")


def signed(fraction: float) -> str:
    """A difference of fractions in points: "+5.6", "−0.3"."""
    return f"{100 * fraction:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def plus_minus(stat: Stat, sign: bool = False) -> str:
    """ "66.8 ± 0.4", or "66.8" where there is no standard error."""
    mean = signed(stat.mean) if sign else percent(stat.mean)
    return mean if math.isnan(stat.error) else f"{mean} ± {error(stat)}"


def error(stat: Stat) -> str:
    """A standard error in points, never rounded to nothing."""
    return f"{100 * stat.error:.1f}" if stat.error >= 0.0005 or stat.error == 0 else f"{100 * stat.error:.1g}"


def seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def count(value: float) -> str:
    """A number of pairs: whole from 10 on, else with as much behind the point as matters."""
    if math.isnan(value):
        return MISSING
    if value >= 9.95 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def times(ratio: float) -> str:
    """A ratio in words: "310 times", "1.4 times"."""
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times"


def duration(seconds: float) -> str:
    """Time that a reader can grasp: 0.0413 is "41.3 ms", 90 is "90.0 s", 5400 is "1 h 30 min"."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 1:
        return f"{_three(1000 * seconds)} ms"
    if seconds < 300:
        return f"{_three(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.95 else f"{value:.1g}"


def distance(value: float) -> str:
    """A squared distance between unit vectors."""
    return MISSING if math.isnan(value) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def named(loss: str) -> str:
    """A loss as one writes it: "multi_similarity" is "multi similarity", "ms" is "MS"."""
    return loss.upper() if len(loss) < 3 else loss.replace("_", " ")


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
