"""How a map of P pixels × C channels is cut into tiles and dealt out to programs.

Program (b, s) of a grid takes the tiles s, s + splits, s + 2·splits, … of its block of channels: all programs together walk
through memory from its start to its end, so that a second pass from the end finds the rest of the first in the cache.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xbm.kernels import resources

# no new kernel for each of their values
SIZES = ["P", "units", "stride", "dy_stride", "more_stride", "splits", "H", "W", "OH", "OW"]


class Kind(NamedTuple):
    """Of a kernel: numbers in a tile, warps of a program, and programs a multiprocessor at most."""

    tile: int
    warps: int
    per_processor: int


# Few, large programs where one of them has to read all the others' sums, two a multiprocessor, which leaves a thread 128
# registers; many small ones where nobody waits for anybody. Of six choices measured on an H200 this was the fastest.
STATISTICS = Kind(4096, 8, 2)
SUMS = Kind(4096, 8, 2)
EACH = Kind(2048, 4, 32)
POOL = Kind(2048, 4, 32)


class Cut(NamedTuple):
    pixels: int  # of a tile
    channels: int
    blocks: int  # of channels
    splits: int  # of pixels
    warps: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.blocks, self.splits, 1


def cut(P: int, C: int, kind: Kind, device: torch.device) -> Cut:
    channels = channel_block(C)
    pixels, blocks = max(1, kind.tile // channels), triton.cdiv(C, channels)
    programs = resources(device)[0] * kind.per_processor
    splits = max(1, min(triton.cdiv(P, pixels), programs // blocks, 65535))
    return Cut(pixels, channels, blocks, splits, kind.warps)


def channel_block(C: int) -> int:
    """64 channels are 128 bytes of 16-bit numbers, a cache line; fewer where too many of them would be past the end."""
    cost = {64: 1.0, 32: 1.1, 16: 1.4}
    return min(cost, key=lambda block: triton.cdiv(C, block) * block * cost[block])


def key(device: torch.device, tensors: tuple[Tensor | None, ...], *constants: Any) -> tuple | None:
    """What tells compiled kernels apart; None where a tensor does not start at a multiple of 16 bytes."""
    if any(x is not None and x.data_ptr() % 16 for x in tensors):
        return None
    return (device, *(None if x is None else x.dtype for x in tensors), *constants)


def on(device: torch.device) -> AbstractContextManager:
    """Kernels start on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
