"""One integer for a similarity and a row, greater for what comes first: no two are equal, so nothing is left to topk."""

import torch
from torch import Tensor

LOW = 2**32 - 1


def ordered_keys(S: Tensor, low: Tensor) -> Tensor:
    """(b, G) int64 of float32 similarities; `low`: (G,), `LOW` less the number of each row.

    The order of floats is that of their bits once negative ones are turned over. Adding 0 makes -0 equal to 0.
    """
    return _turned((S + 0.0).view(torch.int32)).to(torch.int64).bitwise_left_shift_(32).add_(low)


def similarity_of(keys: Tensor) -> Tensor:
    """The similarities that went into the keys, as float32."""
    return _turned((keys >> 32).to(torch.int32)).view(torch.float32)


def _turned(bits: Tensor) -> Tensor:
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
