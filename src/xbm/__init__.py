"""Cross-batch memory for embedding learning: a memory of past embeddings and pair-weighted losses.

Names are loaded on first use, so `xbm --help` does not wait for torch.

Example:
    >>> import torch
    >>> from xbm import ContrastiveLoss, CrossBatchMemory
    >>> memory, loss_fn = CrossBatchMemory(size=1000, dim=8), ContrastiveLoss()
    >>> v = torch.nn.functional.normalize(torch.randn(4, 8, requires_grad=True))
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> memory.enqueue(v.detach(), labels)
    >>> loss_fn(v, labels, memory).backward()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xbm.errors import InputError as InputError
    from xbm.errors import XbmError as XbmError
    from xbm.gradient_cache import cached_backward as cached_backward
    from xbm.losses import CircleLoss as CircleLoss
    from xbm.losses import ContrastiveLoss as ContrastiveLoss
    from xbm.losses import LiftedStructureLoss as LiftedStructureLoss
    from xbm.losses import MarginLoss as MarginLoss
    from xbm.losses import MetricLearningLoss as MetricLearningLoss
    from xbm.losses import MultiSimilarityLoss as MultiSimilarityLoss
    from xbm.losses import NPairsLoss as NPairsLoss
    from xbm.losses import PairLoss as PairLoss
    from xbm.losses import SupConLoss as SupConLoss
    from xbm.losses import TripletLoss as TripletLoss
    from xbm.memory import CrossBatchMemory as CrossBatchMemory
    from xbm.momentum_encoder import MomentumEncoder as MomentumEncoder
    from xbm.two_tower_loss import TwoTowerLoss as TwoTowerLoss
    from xbm_app.launch import train as train
    from xbm_app.train.load import load as load
    from xbm_app.train.pretrained import from_pretrained as from_pretrained

__version__ = "1.0.0"

_HOME = {
    "CircleLoss": "xbm.losses",
    "ContrastiveLoss": "xbm.losses",
    "CrossBatchMemory": "xbm.memory",
    "InputError": "xbm.errors",
    "LiftedStructureLoss": "xbm.losses",
    "MarginLoss": "xbm.losses",
    "MetricLearningLoss": "xbm.losses",
    "MomentumEncoder": "xbm.momentum_encoder",
    "MultiSimilarityLoss": "xbm.losses",
    "NPairsLoss": "xbm.losses",
    "PairLoss": "xbm.losses",
    "SupConLoss": "xbm.losses",
    "TripletLoss": "xbm.losses",
    "TwoTowerLoss": "xbm.two_tower_loss",
    "XbmError": "xbm.errors",
    "cached_backward": "xbm.gradient_cache",
    "from_pretrained": "xbm_app.train.pretrained",
    "load": "xbm_app.train.load",
    "train": "xbm_app.launch",
}
__all__ = ["__version__", *(name for name, home in _HOME.items() if home.startswith("xbm."))]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'xbm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
