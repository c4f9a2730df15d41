"""Cross-batch memory in the trainers of other libraries.

Names are loaded on first use: each needs the library that it is for, and no other.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xbm.integrations.sentence_transformers_loss import MemoryRankingLoss as MemoryRankingLoss

_HOME = {
    "MemoryRankingLoss": "xbm.integrations.sentence_transformers_loss",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'xbm.integrations' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
