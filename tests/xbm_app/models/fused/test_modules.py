"""Whole modules on the kernels, against the same modules on torch's."""

import copy

import pytest
import torch
from torch import nn

from tests.xbm_app.models.fused.maps import channels_last, close
from xbm.kernels import Kernel
from xbm_app.models.fused import fuse
from xbm_app.models.inception import BNInception
from xbm_app.models.trunks import SmallNet

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.fixture
def launched(monkeypatch):
    """How often each kernel was started."""
    counts, call = {}, Kernel.__call__

    def counting(self, *arguments):
        name = self.jitted.fn.__name__ if hasattr(self.jitted, "fn") else self.jitted.__name__
        counts[name] = counts.get(name, 0) + 1
        call(self, *arguments)

    monkeypatch.setattr(Kernel, "__call__", counting)
    return counts


def same(module, *shape, tolerance=1e-5):
    """Output, gradients and buffers of a module, fused and not. Returns the fused one."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.2, 0.5) if parameter.dim() == 1 else None
    plain, fused = copy.deepcopy(module).train(), fuse(copy.deepcopy(module)).train()
    x, found = channels_last(*shape), []
    for one in (plain, fused):
        one.to(memory_format=torch.channels_last)
        given = x.clone().requires_grad_()
        y = one(given)
        if not found:
            upstream = torch.randn(y.shape).to(memory_format=torch.channels_last)
        found.append((y, *torch.autograd.grad(y, [given, *one.parameters()], upstream), *one.state_dict().values()))
    for a, b in zip(*found):
        close(b, a.detach(), tolerance, floor=0.1)  # a bias before a norm has a gradient of 0
    assert all(not norm.tickets.any() for norm in fused.modules() if hasattr(norm, "tickets"))
    return fused


def test_small_net(launched):
    same(SmallNet(channels=3), 2, 3, 16, 16, tolerance=1e-4)
    assert launched == {
        "max_pool_kernel": 4,
        "statistics_kernel": 4,
        "normalize_kernel": 4,
        "parameter_gradient_kernel": 4,
        "input_gradient_kernel": 4,
        "max_pool_gradient_kernel": 4,
    }


def test_an_inception_block_of_googlenet(launched):
    from torchvision.models.googlenet import Inception

    same(Inception(16, 8, 8, 16, 8, 8, 8), 2, 16, 6, 5, tolerance=1e-4)
    assert (
        launched["statistics_kernel"] == launched["input_gradient_kernel"] == 6
        and launched["max_pool_kernel"] == launched["max_pool_gradient_kernel"] == 1
    )


def test_a_bottleneck_and_a_basic_block_of_a_resnet(launched):
    from torchvision.models.resnet import BasicBlock, Bottleneck

    same(Bottleneck(32, 8, downsample=nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32))), 2, 32, 4, 5, tolerance=1e-4)
    assert launched["statistics_kernel"] == 4
    same(BasicBlock(8, 8), 2, 8, 4, 5, tolerance=1e-4)
    assert launched["statistics_kernel"] == 6


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, None])
def test_timms_batch_norm_with_its_activation(act, launched):
    from timm.layers import BatchNormAct2d

    norm = BatchNormAct2d(17, apply_act=act is not None, act_layer=act or nn.ReLU)
    nn.init.constant_(norm.bias, 3.0)
    same(norm, 2, 17, 4, 5)
    assert launched["statistics_kernel"] == 1


def test_what_the_kernels_do_not_know_is_left_to_torch(launched):
    from timm.layers import BatchNormAct2d

    same(BatchNormAct2d(16, act_layer=nn.SiLU), 2, 16, 4, 5)
    same(nn.BatchNorm2d(16, momentum=None), 2, 16, 4, 5)
    same(nn.BatchNorm2d(16, affine=False), 2, 16, 4, 5)
    same(nn.BatchNorm2d(16, track_running_stats=False), 2, 16, 4, 5)
    same(nn.MaxPool2d((3, 2)), 2, 16, 7, 5)
    same(nn.MaxPool2d(3, dilation=2), 2, 16, 7, 5)
    fuse(nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())).eval()(channels_last(2, 16, 4, 5))
    fuse(nn.BatchNorm2d(16))(torch.randn(2, 16, 4, 5))
    assert launched == {}


def test_an_activation_is_not_applied_twice(monkeypatch):
    net, x = fuse(nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.BatchNorm2d(16), nn.ReLU6())), channels_last(2, 16, 4, 5)
    monkeypatch.setattr(nn.ReLU, "forward", None)
    monkeypatch.setattr(nn.ReLU6, "forward", None)
    assert net(x).min() == 0


def test_somebody_who_watches_a_norm_sees_it_alone():
    net, seen = fuse(nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())), []
    net[0].register_forward_hook(lambda module, given, y: seen.append(y))
    y = net(channels_last(2, 16, 4, 5))
    assert seen[0].min() < 0 and torch.equal(seen[0].relu(), y)


@pytest.mark.slow
def test_bn_inception(launched):
    same(BNInception(), 3, 3, 64, 64, tolerance=2e-2)
    assert launched["statistics_kernel"] == 69 and launched["max_pool_kernel"] == launched["max_pool_gradient_kernel"] == 5
