"""The backward kernels against autograd through torch's batch normalisation."""

import pytest
import torch

from tests.xbm_app.models.fused.maps import (
    ACTIVATIONS,
    CASES,
    TOLERANCE,
    channel_slice,
    channels_last,
    close,
    parameters,
    torch_norm,
)
from xbm_app.models.fused.batch_norm import KNOWN
from xbm_app.models.fused.layout import pixel_stride
from xbm_app.models.fused.norm_backward import backward
from xbm_app.models.fused.norm_forward import forward

pytestmark = pytest.mark.usefixtures("small_tiles")


def by_kernels(x, dy, weight, bias, activation, inputs=True):
    C, act = x.shape[1], KNOWN.index(activation)
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    running = torch.zeros(C), torch.ones(C), torch.tensor(0)
    _, stats = forward(x, pixel_stride(x), weight, bias, *running, tickets, 0.1, 1e-3, act)
    *found, of_more = backward(dy, x, pixel_stride(x), weight, bias, stats, tickets, act, inputs)
    assert not tickets.any() and of_more is None
    return found


def by_torch(x, dy, weight, bias, activation):
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(torch_norm(*wide, 1e-3, activation), wide, dy.double())


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_gradients_are_torchs(shape, dtype):
    for activation, make in zip(ACTIVATIONS, (channels_last, channel_slice, channel_slice)):
        x, dy = channels_last(*shape, dtype=dtype, scale=3.0, shift=2.0), make(*shape, dtype=dtype)
        weight, bias = parameters(shape[1])
        found = by_kernels(x, dy, weight, bias, activation)
        for one, other in zip(found, by_torch(x, dy, weight, bias, activation)):
            close(one, other, TOLERANCE[dtype])
        assert found[0].dtype == dtype and found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dy", [torch.randn(3, 16, 7, 5), torch.ones(()).expand(3, 16, 7, 5)], ids=["channels first", "expanded"]
)
def test_a_gradient_that_lies_in_another_way_is_copied(dy):
    x, (weight, bias) = channels_last(3, 16, 7, 5), parameters(16)
    for one, other in zip(by_kernels(x, dy, weight, bias, "relu"), by_torch(x, dy, weight, bias, "relu")):
        close(one, other, 1e-5)


def test_the_mask_is_that_of_the_rounded_output():
    """5.9995 is 6 in float16, where ReLU6 no longer passes a gradient."""
    x = torch.tensor([-1.0, 1.0], dtype=torch.float16).view(2, 1, 1, 1)
    weight, bias = torch.tensor([1.0]), torch.tensor([4.99995])
    _, _, of_bias = by_kernels(x, torch.ones_like(x), weight, bias + 0.0005, "relu6")
    assert of_bias.tolist() == [1.0]


def test_the_inputs_gradient_is_left_out_where_nobody_needs_it():
    x, (weight, bias) = channels_last(3, 17, 7, 5), parameters(17)
    dx, *others = by_kernels(x, x, weight, bias, "relu", inputs=False)
    assert dx is None and all(torch.equal(a, b) for a, b in zip(others, by_kernels(x, x, weight, bias, "relu")[1:]))
