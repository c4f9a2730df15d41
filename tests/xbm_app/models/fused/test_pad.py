"""Padding by words against torch's own; and timm's convolutions that pad by themselves."""

import copy

import pytest
import torch
from timm.layers import Conv2dSame
from torch.nn import functional as F

from xbm_app.models import fused as fused_layers
from xbm_app.models.fused import fuse, in_words, pad

SIDES = [(0, 1, 0, 1), (1, 2, 1, 2), (3, 0, 0, 2), (0, 0, 0, 0)]


def a_map(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_gives_what_torch_gives(sides, dtype):
    x = a_map(2, 8, 5, 7, dtype=dtype).requires_grad_()
    y, expected = pad(x, *sides), F.pad(x, sides)
    assert torch.equal(y, expected) and y.stride() == expected.stride() and in_words(x)
    along = torch.randn_like(y)
    (found,), (wanted,) = (torch.autograd.grad(each, x, along) for each in (y, expected))
    assert torch.equal(found, wanted) and found.is_contiguous(memory_format=torch.channels_last)


def test_second_derivatives_and_bits():
    x = a_map(1, 4, 3, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pad(x, 1, 0, 2, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: pad(x, 1, 0, 2, 1) ** 2, x)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).reshape(1, 4, 1, 1).to(memory_format=torch.channels_last)
    assert torch.equal(pad(odd, 1, 1, 1, 1)[..., 1, 1].view(torch.int32), odd[..., 0, 0].view(torch.int32))


@pytest.mark.parametrize("x", [a_map(2, 3, 5, 7), torch.randn(2, 8, 5, 7), a_map(2, 16, 5, 7)[:, 3:11]])
def test_what_is_not_made_of_words_is_left_to_torch(x):
    assert not in_words(x) and torch.equal(pad(x, 0, 1, 1, 0), F.pad(x, (0, 1, 1, 0)))
    y = a_map(2, 8, 5, 7)
    assert torch.equal(pad(y, -1, 0, 0, 1), F.pad(y, (-1, 0, 0, 1)))


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (5, 2, 1), (5, (1, 3), 1), (3, 1, 2)])
@pytest.mark.parametrize("size", [(8, 8), (7, 10)])
def test_convolutions_that_pad_by_themselves(kernel, stride, dilation, size, monkeypatch):
    plain = Conv2dSame(8, 8, kernel, stride, dilation=dilation, groups=8)
    fused = fuse(copy.deepcopy(plain))
    calls = []
    monkeypatch.setattr(fused_layers, "readable", lambda x: True)
    monkeypatch.setattr(fused_layers, "pad", lambda x, *sides: calls.append(sides) or pad(x, *sides))
    x = a_map(2, 8, *size)
    assert torch.equal(fused(x), plain(x)) and len(calls) == 1
