"""Channels-last maps of odd shapes, and torch's own batch normalisation and pooling in float64 to compare with."""

import torch
from torch.nn import functional as F

CASES = [
    *(
        (shape, torch.float32)
        for shape in [(3, 5, 7, 5), (3, 17, 7, 5), (3, 64, 7, 5), (3, 67, 7, 5), (2, 1, 4, 3), (7, 24, 1, 1)]
    ),
    *((shape, torch.float16) for shape in [(3, 5, 7, 5), (3, 32, 7, 5)]),
]
ACTIVATIONS = ("none", "relu", "relu6")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def channels_last(*shape, dtype=torch.float32, scale=1.0, shift=0.0):
    return (torch.randn(shape) * scale + shift).to(dtype).to(memory_format=torch.channels_last)


def channel_slice(*shape, dtype=torch.float32):
    """Some channels of a wider map, as concatenation hands them back."""
    N, C, H, W = shape
    return channels_last(N, C + 24, H, W, dtype=dtype)[:, 8 : 8 + C]


def parameters(C):
    return torch.randn(C) + 0.5, torch.randn(C) * 0.5 + 1.0


def torch_norm(x, weight, bias, eps, activation):
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return {"none": lambda y: y, "relu": F.relu, "relu6": F.relu6}[activation](y)


def close(found, wanted, tolerance, floor=1e-3):
    """Relative to the largest: single elements near 0 are differences of large ones."""
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() <= tolerance * max(float(wanted.abs().max()), floor)
