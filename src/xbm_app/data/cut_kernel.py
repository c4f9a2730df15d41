# mypy: disable-error-code="no-untyped-def"
"""Crops windows from images that are stored on a GPU, flips and normalizes them, in one kernel: as tensor operations this
takes as long as a few layers of a network.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.kernels import on_device_of


@triton.jit
def crop_kernel(
    table,  # (pixels of all images, C)
    windows,  # (8, B): start, height and width of the image; top, left, height, width and flip of the window
    offset, gain,  # (C,)
    out,  # (B, size, size, C)
    B, size, C: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start, height, width = tl.load(windows + b), tl.load(windows + B + b), tl.load(windows + 2 * B + b)
    top, left, flip = tl.load(windows + 3 * B + b), tl.load(windows + 4 * B + b), tl.load(windows + 7 * B + b)
    offs_y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    offs_x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)  # pixel and channel
    x, c = offs_x // C, offs_x % C
    row = tl.minimum(tl.maximum(top + offs_y, 0), height - 1)
    column = tl.minimum(tl.maximum(left + tl.where(flip > 0, size - 1 - x, x), 0), width - 1)
    mask = (offs_y < size)[:, None] & (offs_x < size * C)[None, :]
    pixel = tl.load(table + ((start + row * width)[:, None] + column[None, :]) * C + c[None, :], mask=mask, other=0)
    value = (pixel.to(tl.float32) - tl.load(offset + c)[None, :]) * tl.load(gain + c)[None, :]
    offs_out = (b.to(tl.int64) * size + offs_y)[:, None] * (size * C) + offs_x[None, :]
    tl.store(out + offs_out, value, mask=mask)


@on_device_of(0)
def cut_windows(table: Tensor, windows: Tensor, size: int, norm: tuple[Tensor, Tensor]) -> Tensor:
    """(B, C, size, size) float32, channels-last: windows of size × size. Beyond an edge, its pixels are repeated."""
    B, C = windows.shape[1], table.shape[1]
    out = torch.empty((B, size, size, C), dtype=torch.float32, device=table.device)
    grid = (B, triton.cdiv(size, 4), triton.cdiv(size * C, 1024))
    crop_kernel[grid](table, windows, *norm, out, B, size, C, 4, 1024, num_warps=4, enable_fp_fusion=True)
    return out.permute(0, 3, 1, 2)
