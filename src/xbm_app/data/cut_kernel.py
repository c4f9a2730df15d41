# mypy: disable-error-code="no-untyped-def"
"""Windows cut out of images that lie on a GPU, mirrored and normalised, in one kernel: as plain tensor operations they take
as long as a few layers of a network."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def cut(
    table, windows,  # (pixels of all images, C); (8, B): start, height, width of the image, then top, left, height, width, flip
    offset, gain, out,  # (C,), (C,), (B, size, size, C)
    B, size, C: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start, height, width = tl.load(windows + b), tl.load(windows + B + b), tl.load(windows + 2 * B + b)
    top, left, flip = tl.load(windows + 3 * B + b), tl.load(windows + 4 * B + b), tl.load(windows + 7 * B + b)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * ACROSS + tl.arange(0, ACROSS)
    x, c = place // C, place % C
    row = tl.minimum(tl.maximum(top + y, 0), height - 1)
    column = tl.minimum(tl.maximum(left + tl.where(flip > 0, size - 1 - x, x), 0), width - 1)
    inside = (y < size)[:, None] & (place < size * C)[None, :]
    pixel = tl.load(table + ((start + row * width)[:, None] + column[None, :]) * C + c[None, :], mask=inside, other=0)
    value = (pixel.to(tl.float32) - tl.load(offset + c)[None, :]) * tl.load(gain + c)[None, :]
    at = (b.to(tl.int64) * size + y)[:, None] * (size * C) + place[None, :]
    tl.store(out + at, value, mask=inside)


def cut_windows(table: Tensor, windows: Tensor, size: int, norm: tuple[Tensor, Tensor]) -> Tensor:
    """(B, C, size, size) float32, channels last: windows of size × size, pixels beyond an edge repeated."""
    B, C = windows.shape[1], table.shape[1]
    out = torch.empty((B, size, size, C), dtype=torch.float32, device=table.device)
    grid = (B, triton.cdiv(size, 4), triton.cdiv(size * C, 1024))
    cut[grid](table, windows, *norm, out, B, size, C, 4, 1024, num_warps=4)
    return out.permute(0, 3, 1, 2)
