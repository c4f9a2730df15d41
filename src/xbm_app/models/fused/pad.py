"""Zero-padding of channels-last maps in words of eight bytes: torch copies number by number, and a number has two or four."""

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
    """Whether every pixel of the map consists of whole words."""
    whole = x.shape[1] * x.element_size() % WORD.itemsize == 0 and x.storage_offset() * x.element_size() % WORD.itemsize == 0
    return whole and x.is_contiguous(memory_format=torch.channels_last)


def as_words(x: Tensor) -> Tensor:
    """(N, H, words of a row): a view of the same memory."""
    return x.permute(0, 2, 3, 1).flatten(2).view(WORD)


def empty_map(x: Tensor, H: int, W: int) -> Tensor:
    """An empty channels-last map with the images and channels of `x`."""
    return torch.empty((*x.shape[:2], H, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
        _, C, H, W = x.shape
        ctx.sides = left, right, top, bottom
        y = empty_map(x, top + H + bottom, left + W + right)
        pixel = C * x.element_size() // WORD.itemsize
        words = as_words(y)
        words[:, :top].zero_()
        words[:, top + H :].zero_()
        middle = words[:, top : top + H]
        middle[..., : left * pixel].zero_()
        middle[..., (left + W) * pixel :].zero_()
        middle[..., left * pixel : (left + W) * pixel] = as_words(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        left, right, top, bottom = ctx.sides
        _, C, H, W = dy.shape
        if torch.is_grad_enabled() or not in_words(dy):  # torch's own operation has a second derivative
            return F.pad(dy, (-left, -right, -top, -bottom)), None, None, None, None
        dx = empty_map(dy, H - top - bottom, W - left - right)
        pixel = C * dy.element_size() // WORD.itemsize
        as_words(dx).copy_(as_words(dy)[:, top : H - bottom, left * pixel : (W - right) * pixel])
        return dx, None, None, None, None
