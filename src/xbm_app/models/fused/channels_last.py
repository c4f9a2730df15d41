"""Channels-last maps as the kernels see them: rows of pixels, in tiles of pixels × channels.

Program (b, s) of a grid takes the tiles s, s + splits, s + 2·splits, … of its block of channels. All programs together walk
through memory from start to end, so that a second pass that starts at the end finds part of the map in the cache.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xbm.kernels import HAS_TRITON, INTERPRETED, has_kernels, is_aligned, resources

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sizes that change from call to call: kernels are not compiled again for their values.
SIZES = ["P", "units", "stride", "dy_stride", "residual_stride", "num_splits", "H", "W", "OH", "OW"]


def readable(x: Tensor) -> bool:
    """Whether the kernels take `x`: a channels-last map, or a slice of its channels, on a GPU."""
    return (
        (has_kernels(x.device) or (HAS_TRITON and INTERPRETED))
        and x.dtype in TYPES
        and x.dim() == 4
        and x.numel() > 0
        and pixel_stride(x) is not None
        and not torch.compiler.is_compiling()  # the compiler fuses what it can trace
    )


def pixel_stride(x: Tensor) -> int | None:
    """The distance between pixels in memory, if it is the same for all and the channels of a pixel are contiguous; else None.

    It exceeds the number of channels for a slice of channels, such as the gradient of a concatenation.
    """
    N, C, H, W = x.shape
    if C > 1 and x.stride(1) != 1:
        return None
    distance, pixels = None, 1
    for size, stride in ((W, x.stride(3)), (H, x.stride(2)), (N, x.stride(0))):
        if size > 1:
            if distance is None:
                distance = stride
            elif stride != distance * pixels:
                return None
        pixels *= size
    distance = C if distance is None else distance
    return distance if distance >= C else None


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` and its pixel stride. It is copied only if it has none."""
    stride = pixel_stride(x)
    if stride is not None:
        return x, stride
    x = x.contiguous(memory_format=torch.channels_last)
    return x, x.shape[1]


def vector_size(*sizes: int) -> int:
    """How many channels are loaded at once: 8 if every size and stride is a multiple of it, else 1."""
    return 8 if all(size % 8 == 0 for size in sizes) else 1


class TileConfig(NamedTuple):
    """How the programs of a kernel run."""

    size: int  # numbers in a tile
    warps: int
    per_processor: int  # programs per multiprocessor, at most


# Reductions: few, large programs, because one of them has to read the sums of all others; two per multiprocessor, which
# leaves 128 registers to a thread. Elementwise kernels: many small programs, because none waits for another. The fastest of
# six choices on an H200.
REDUCTION = TileConfig(4096, 8, 2)
ELEMENTWISE = TileConfig(2048, 4, 32)
NEIGHBORHOOD = TileConfig(512, 4, 32)  # response norm: a thread holds 14 numbers per channel


class Tiling(NamedTuple):
    pixels: int  # of a tile
    channels: int
    blocks: int  # of channels
    splits: int  # of pixels
    warps: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.blocks, self.splits, 1


def tile_map(P: int, C: int, config: TileConfig, device: torch.device) -> Tiling:
    """Divides a map of P pixels × C channels into tiles and programs."""
    channels = channel_block(C)
    pixels, blocks = max(1, config.size // channels), -(-C // channels)
    programs = resources(device)[0] * config.per_processor
    splits = max(1, min(-(-P // pixels), programs // blocks, 65535))
    return Tiling(pixels, channels, blocks, splits, config.warps)


def channel_block(C: int) -> int:
    """64 channels are 128 bytes of 16-bit numbers, a cache line; fewer if too many of them would be beyond the last channel."""
    cost = {64: 1.0, 32: 1.1, 16: 1.4}
    return min(cost, key=lambda block: -(-C // block) * block * cost[block])


def launch_key(device: torch.device, tensors: tuple[Tensor | None, ...], *constants: Any) -> tuple | None:
    """What distinguishes compiled kernels; None if a tensor is not aligned."""
    if not is_aligned(*tensors):
        return None
    return (device, *(None if x is None else x.dtype for x in tensors), *constants)
