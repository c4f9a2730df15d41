"""The op as autograd sees it."""

import pytest
import torch

from tests.xbm_app.models.fused.maps import channel_slice, channels_last, close, parameters, torch_norm
from xbm_app.models.fused.batch_norm import PLAIN, batch_norm_act

pytestmark = pytest.mark.usefixtures("small_tiles")


def call(x, weight, bias, activation="relu", more=None):
    C = x.shape[1]
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    running = torch.zeros(C), torch.ones(C), torch.tensor(0)
    return batch_norm_act(x, weight, bias, *running, tickets, 0.1, 1e-3, activation, more)


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
    x, weight, bias, more = (t.requires_grad_() for t in (maps[0], *parameters(C), maps[1]))
    upstream = channels_last(3, C, 7, 5)
    ours = call(x, weight, bias, activation, more)
    theirs = PLAIN[activation](torch_norm(x, weight, bias, 1e-3, "none") + more)
    close(ours.detach(), theirs.detach(), 1e-5)
    for one, other in zip(*(torch.autograd.grad(y, (x, weight, bias, more), upstream) for y in (ours, theirs)), strict=True):
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
    batch_norm_act(x, weight, bias, mean, var, batches, torch.zeros(1, dtype=torch.int32), 0.1, 1e-3, "relu")
    assert mean._version > before
