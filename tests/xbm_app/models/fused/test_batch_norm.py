"""Batch normalization: the kernels of both directions against torch, and the op as autograd sees it."""

import pytest
import torch
from torch.nn import functional as F

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
from xbm_app.models.fused import batch_norm
from xbm_app.models.fused.batch_norm import BatchNormAct, backward, forward
from xbm_app.models.fused.channels_last import pixel_stride

pytestmark = pytest.mark.usefixtures("small_tiles")


def forward_kernels(x, weight, bias, activation="none", momentum=0.3, eps=1e-3):
    C = x.shape[1]
    running = torch.full((C,), 0.5), torch.full((C,), 2.0), torch.tensor(4)
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    y, stats = forward(
        x, pixel_stride(x), weight, bias, *running, tickets, momentum, eps, batch_norm.ACTIVATIONS.index(activation)
    )
    assert not tickets.any()
    return y, stats, running


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_output_and_statistics_are_torchs(shape, dtype):
    x = channels_last(*shape, dtype=dtype, scale=3.0, shift=2.0)
    weight, bias = parameters(shape[1])
    for activation in ACTIVATIONS:
        y, stats, (mean, var, batches) = forward_kernels(x, weight, bias, activation)
        wide = x.double()
        close(y, torch_norm(wide, weight.double(), bias.double(), 1e-3, activation), TOLERANCE[dtype])
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        norm = torch.nn.BatchNorm2d(shape[1], momentum=0.3, dtype=torch.float64)
        norm.running_mean.fill_(0.5), norm.running_var.fill_(2.0)
        norm(wide)
        close(mean, norm.running_mean, 1e-6)
        close(var, norm.running_var, 1e-5)
        close(stats[1], (wide.var((0, 2, 3), unbiased=False) + 1e-3).rsqrt(), 1e-5)
        assert int(batches) == 5


def test_variances_survive_a_mean_ten_thousand_times_as_large():
    x = channels_last(3, 17, 7, 5, shift=1e4)
    _, stats, _ = forward_kernels(x, *parameters(17), eps=0.0)
    close(stats[1], x.double().var((0, 2, 3), unbiased=False).rsqrt(), 1e-4)


def test_variances_survive_an_image_that_is_unlike_the_others():
    x = channels_last(3, 17, 7, 5)
    x[0] = 3e3
    _, stats, _ = forward_kernels(x, *parameters(17), eps=0.0)
    close(stats[1], x.double().var((0, 2, 3), unbiased=False).rsqrt(), 1e-5)


def test_a_slice_of_channels_is_read_where_it_lies():
    whole = channels_last(3, 40, 7, 5)
    weight, bias = parameters(16)
    for start in (8, 3):  # aligned, and not
        part = whole[:, start : start + 16]
        y, _, _ = forward_kernels(part, weight, bias, "relu")
        close(y, torch_norm(part, weight, bias, 1e-3, "relu"), 1e-5)


def test_nan_goes_through_as_in_torch():
    x = channels_last(3, 17, 7, 5)
    x[1, 3, 2, 2] = torch.nan
    y, _, (mean, var, _) = forward_kernels(x, *parameters(17), "relu6")
    assert y.isnan().any((0, 2, 3)).nonzero().tolist() == [[3]] and y[:, 3].isnan().all()
    assert mean.isnan().nonzero().tolist() == var.isnan().nonzero().tolist() == [[3]]


def test_the_same_bits_twice():
    x, (weight, bias) = channels_last(3, 67, 7, 5), parameters(67)
    assert all(torch.equal(a, b) for a, b in zip(*(forward_kernels(x, weight, bias)[:2] for _ in range(2))))


# ------------------------------------------------------------------ backward kernels


def backward_kernels(x, dy, weight, bias, activation, needs_dx=True):
    C, act = x.shape[1], batch_norm.ACTIVATIONS.index(activation)
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    running = torch.zeros(C), torch.ones(C), torch.tensor(0)
    _, stats = forward(x, pixel_stride(x), weight, bias, *running, tickets, 0.1, 1e-3, act)
    *found, dresidual = backward(dy, x, pixel_stride(x), weight, bias, stats, tickets, act, needs_dx)
    assert not tickets.any() and dresidual is None
    return found


def torch_backward(x, dy, weight, bias, activation):
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(torch_norm(*wide, 1e-3, activation), wide, dy.double())


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_gradients_are_torchs(shape, dtype):
    for activation, make in zip(ACTIVATIONS, (channels_last, channel_slice, channel_slice)):
        x, dy = channels_last(*shape, dtype=dtype, scale=3.0, shift=2.0), make(*shape, dtype=dtype)
        weight, bias = parameters(shape[1])
        found = backward_kernels(x, dy, weight, bias, activation)
        for one, other in zip(found, torch_backward(x, dy, weight, bias, activation)):
            close(one, other, TOLERANCE[dtype])
        assert found[0].dtype == dtype and found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dy", [torch.randn(3, 16, 7, 5), torch.ones(()).expand(3, 16, 7, 5)], ids=["channels first", "expanded"]
)
def test_a_gradient_that_lies_in_another_way_is_copied(dy):
    x, (weight, bias) = channels_last(3, 16, 7, 5), parameters(16)
    for one, other in zip(backward_kernels(x, dy, weight, bias, "relu"), torch_backward(x, dy, weight, bias, "relu")):
        close(one, other, 1e-5)


def test_the_mask_is_that_of_the_rounded_output():
    """5.9995 is 6 in float16, where ReLU6 no longer passes a gradient."""
    x = torch.tensor([-1.0, 1.0], dtype=torch.float16).view(2, 1, 1, 1)
    weight, bias = torch.tensor([1.0]), torch.tensor([4.99995])
    _, _, of_bias = backward_kernels(x, torch.ones_like(x), weight, bias + 0.0005, "relu6")
    assert of_bias.tolist() == [1.0]


def test_the_inputs_gradient_is_left_out_where_nobody_needs_it():
    x, (weight, bias) = channels_last(3, 17, 7, 5), parameters(17)
    dx, *others = backward_kernels(x, x, weight, bias, "relu", needs_dx=False)
    assert dx is None and all(torch.equal(a, b) for a, b in zip(others, backward_kernels(x, x, weight, bias, "relu")[1:]))


# ------------------------------------------------------------------ the op


PLAIN = {"none": lambda y: y, "relu": F.relu, "relu6": F.relu6}


def call(x, weight, bias, activation="relu", residual=None):
    C = x.shape[1]
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    running = torch.zeros(C), torch.ones(C), torch.tensor(0)
    return BatchNormAct.apply(x, weight, bias, residual, *running, tickets, 0.1, 1e-3, activation)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_concatenation_hands_back_slices_and_gradients_are_torchs(activation):
    leaves = [t.requires_grad_() for C in (17, 24) for t in (channels_last(3, C, 7, 5, scale=2.0), *(p for p in parameters(C)))]
    upstream = channels_last(3, 41, 7, 5)
    grads = []
    for norm in (call, lambda *a: torch_norm(*a[:3], 1e-3, a[3])):
        y = torch.cat([norm(*leaves[:3], activation), norm(*leaves[3:], activation)], 1)
        grads.append(torch.autograd.grad(y, leaves, upstream))
    for one, other in zip(*grads):
        close(one, other, 1e-5)


def test_only_asked_for_gradients_come():
    x, (weight, bias) = channels_last(3, 17, 7, 5), parameters(17)
    call(x, weight.requires_grad_(), bias).sum().backward()
    assert x.grad is None and bias.grad is None and weight.grad.norm() > 0


@pytest.mark.parametrize("make", [channels_last, channel_slice])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("C", [17, 24])
def test_a_map_can_be_added_before_the_activation(activation, C, make):
    maps = channels_last(3, C, 7, 5, scale=2.0), make(3, C, 7, 5)
    x, weight, bias, residual = (t.requires_grad_() for t in (maps[0], *parameters(C), maps[1]))
    upstream = channels_last(3, C, 7, 5)
    ours = call(x, weight, bias, activation, residual)
    theirs = PLAIN[activation](torch_norm(x, weight, bias, 1e-3, "none") + residual)
    close(ours.detach(), theirs.detach(), 1e-5)
    for one, other in zip(
        *(torch.autograd.grad(y, (x, weight, bias, residual), upstream) for y in (ours, theirs)), strict=True
    ):
        close(one, other, 1e-5)


def test_a_gradient_of_the_gradient_is_torchs_with_a_map_added():
    leaves = [t.requires_grad_() for t in (channels_last(3, 5, 3, 4), *parameters(5), channels_last(3, 5, 3, 4))]
    found = []
    for y in (call(*leaves[:3], "relu", leaves[3]), torch.relu(torch_norm(*leaves[:3], 1e-3, "none") + leaves[3])):
        (first,) = torch.autograd.grad((y**2).sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), leaves))
    for one, other in zip(*found):
        close(one, other, 1e-4)


def test_a_gradient_of_the_gradient_is_torchs():
    leaves = [t.requires_grad_() for t in (channels_last(3, 5, 3, 4), *parameters(5))]
    found = []
    for norm in (call, lambda *a: torch_norm(*a, 1e-3, "relu")):
        (first,) = torch.autograd.grad((norm(*leaves) ** 2).sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), leaves))
    for one, other in zip(*found):
        close(one, other, 1e-4)


def test_the_running_statistics_cannot_change_unseen_under_autograd():
    x, (weight, bias) = channels_last(3, 5, 7, 5), parameters(5)
    mean, var, batches = torch.zeros(5, requires_grad=False), torch.ones(5), torch.tensor(0)
    before = mean._version
    BatchNormAct.apply(x, weight, bias, None, mean, var, batches, torch.zeros(1, dtype=torch.int32), 0.1, 1e-3, "relu")
    assert mean._version > before
