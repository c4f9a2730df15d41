"""What makes two saved states the same."""

from typing import Any

import torch


def same(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested values differ, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [place for key in one for place in same(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [place for k, (a, b) in enumerate(zip(one, other)) for place in same(a, b, f"{where}/{k}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return [] if alike and _bits(one) == _bits(other) else [where]
    return [] if type(one) is type(other) and (one == other or (one != one and other != other)) else [where]


def _bits(values: torch.Tensor) -> bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16
