"""The package's losses by name. A study's own, once it is imported, is in LOSSES too, and no test here is about it."""

from xbm.losses import LOSSES

NAMES = sorted(name for name, loss in LOSSES.items() if loss.__module__.startswith("xbm.losses."))
