"""Channels-last maps as rows, one a pixel: which tensors the kernels can read where they lie."""

import torch
from torch import Tensor

from xbm.kernels import HAS_TRITON, INTERPRETED, has_kernels

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def readable(x: Tensor) -> bool:
    """Whether the kernels take `x`: a channels-last map, or a slice of one's channels, on a GPU."""
    return (
        (has_kernels(x.device) or (HAS_TRITON and INTERPRETED))
        and x.dtype in TYPES
        and x.dim() == 4
        and x.numel() > 0
        and pixel_stride(x) is not None
        and not torch.compiler.is_compiling()  # the compiler fuses what it can see into
    )


def pixel_stride(x: Tensor) -> int | None:
    """How far apart in memory pixels are, if it is the same for all and their channels lie side by side; else None.

    A slice of channels, such as concatenation hands back as a gradient, has more than its own channels between pixels.
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
    """`x`, copied only if its pixels do not lie at one distance, and that distance."""
    stride = pixel_stride(x)
    if stride is not None:
        return x, stride
    x = x.contiguous(memory_format=torch.channels_last)
    return x, x.shape[1]


def vector(*sizes: int) -> int:
    """How many channels are read at once: 8 if every size and stride is a multiple of it, else 1."""
    return 8 if all(size % 8 == 0 for size in sizes) else 1
