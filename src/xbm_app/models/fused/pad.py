"""Zeros around a channels-last map, moved eight bytes at a time: torch moves them number by number, and a number is two."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = torch.int64


def pad(x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
    """F.pad(x, (left, right, top, bottom)) for a map (N, C, H, W)."""
    if not in_words(x) or min(left, right, top, bottom) < 0:
        return F.pad(x, (left, right, top, bottom))
    return _Pad.apply(x, left, right, top, bottom)


def in_words(x: Tensor) -> bool:
    """Whether every pixel of the map is made of whole words."""
    whole = x.shape[1] * x.element_size() % WORD.itemsize == 0 and x.storage_offset() * x.element_size() % WORD.itemsize == 0
    return whole and x.is_contiguous(memory_format=torch.channels_last)


def rows(x: Tensor) -> Tensor:
    """(N, H, words of a row): the same memory."""
    return x.permute(0, 2, 3, 1).flatten(2).view(WORD)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
        N, C, H, W = x.shape
        ctx.sides = left, right, top, bottom
        y = torch.empty((N, C, top + H + bottom, left + W + right), dtype=x.dtype, device=x.device,
                        memory_format=torch.channels_last)  # fmt: skip
        pixel = C * x.element_size() // WORD.itemsize
        to = rows(y)
        to[:, :top].zero_()
        to[:, top + H :].zero_()
        middle = to[:, top : top + H]
        middle[..., : left * pixel].zero_()
        middle[..., (left + W) * pixel :].zero_()
        middle[..., left * pixel : (left + W) * pixel] = rows(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        left, right, top, bottom = ctx.sides
        N, C, H, W = dy.shape
        if torch.is_grad_enabled() or not in_words(dy):  # a gradient of this gradient will be asked for: from torch's own parts
            return F.pad(dy, (-left, -right, -top, -bottom)), None, None, None, None
        dx = torch.empty((N, C, H - top - bottom, W - left - right), dtype=dy.dtype, device=dy.device,
                         memory_format=torch.channels_last)  # fmt: skip
        pixel = C * dy.element_size() // WORD.itemsize
        rows(dx).copy_(rows(dy)[:, top : H - bottom, left * pixel : (W - right) * pixel])
        return dx, None, None, None, None
