"""The original GoogLeNet against its published table, and its parts by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xbm_app.data.transforms import Augmentation, normalisation
from xbm_app.models.fused import fuse
from xbm_app.models.inception import BLOCKS, GoogLeNet, Inception, local_response_norm
from xbm_app.models.trunks import build_trunk

# Channels and side after each block for an image of 224 × 224, from the table of the paper that published the network.
OUTPUTS = {
    "inception3a": (256, 28), "inception3b": (480, 28), "maxpool3": (480, 14), "inception4a": (512, 14),
    "inception4b": (512, 14), "inception4c": (512, 14), "inception4d": (528, 14), "inception4e": (832, 14),
    "maxpool4": (832, 7), "inception5a": (832, 7), "inception5b": (1024, 7),
}  # fmt: skip


@pytest.fixture(scope="module")
def net() -> GoogLeNet:
    torch.manual_seed(0)
    return GoogLeNet()


@torch.no_grad()
def test_each_block_has_the_published_width_and_side(net: GoogLeNet) -> None:
    sizes = {}
    handles = [
        net.get_submodule(name).register_forward_hook(
            lambda _, __, y, name=name: sizes.update({name: (y.shape[1], y.shape[2])})
        )
        for name in ("conv1", "maxpool1", "conv3", "maxpool2", *BLOCKS)
    ]
    assert net(torch.zeros(1, 3, 224, 224)).shape == (1, 1024, 7, 7)
    for handle in handles:
        handle.remove()
    assert sizes == {"conv1": (64, 112), "maxpool1": (64, 56), "conv3": (192, 56), "maxpool2": (192, 28), **OUTPUTS}


def test_there_are_57_convolutions_with_bias_and_no_batch_normalization(net: GoogLeNet) -> None:
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 57 and all(each.bias is not None for each in convolutions)
    assert len(net.state_dict()) == 2 * 57
    assert sum(each.numel() for each in net.parameters()) == 5_973_552  # 6,998,552 with the classifier of 1,025,000


def test_names_are_torchvisions_and_five_by_five_is_true(net: GoogLeNet) -> None:
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7) and shapes["conv3.weight"] == (192, 64, 3, 3)
    assert shapes["inception3a.branch1.bias"] == (64,) and shapes["inception3a.branch2.1.weight"] == (128, 96, 3, 3)
    assert shapes["inception5b.branch3.1.weight"] == (128, 48, 5, 5)
    assert shapes["inception4e.branch4.1.weight"] == (128, 528, 1, 1)


@torch.no_grad()
def test_an_inception_block_by_hand() -> None:
    """Weights of one, biases of −1, one bright pixel: every branch is a sum over its window."""
    block = Inception(1, 1, 1, 1, 1, 1, 1)
    for name, value in block.named_parameters():
        value.fill_(1.0 if name.endswith("weight") else -1.0)
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 3, 3] = 4.0
    one, three, five, pooled = block(x)[0]
    ring = torch.zeros(7, 7)
    ring[3, 3] = 3.0  # relu(4 − 1), elsewhere relu(−1)
    assert torch.equal(one, ring)
    assert torch.equal(three, 2 * F.max_pool2d(ring[None, None], 3, 1, 1)[0, 0] / 3)  # relu(3 − 1) within 3 × 3
    assert torch.equal(five, 2 * F.max_pool2d(ring[None, None], 5, 1, 2)[0, 0] / 3)  # and within 5 × 5
    assert torch.equal(pooled, F.max_pool2d(ring[None, None], 3, 1, 1)[0, 0])  # relu(4 − 1) within 3 × 3


@torch.no_grad()
@pytest.mark.parametrize(("side", "halved"), [(112, 56), (56, 28), (7, 3), (8, 4), (14, 7)])
def test_pools_round_up_as_caffe_does(net: GoogLeNet, side: int, halved: int) -> None:
    x = torch.arange(side * side, dtype=torch.float32).view(1, 1, side, side)
    pooled = net.maxpool1(x)
    assert pooled.shape[2:] == (halved, halved)
    assert pooled[0, 0, 0, 0] == x[0, 0, 2, 2] and pooled[0, 0, -1, -1] == x[0, 0, -1, -1]


def formula(x: Tensor) -> Tensor:
    """Local response normalization as published: n = 5, α = 1e-4, β = 0.75, k = 1, α divided by n."""
    squares = F.pad(x.square(), (0, 0, 0, 0, 2, 2))
    total = sum(squares[:, k : k + x.shape[1]] for k in range(5))
    return x / (1 + 1e-4 / 5 * total) ** 0.75


@pytest.mark.parametrize("channels", [1, 3, 7, 64])
def test_local_response_norm_is_the_published_formula_with_its_gradient(channels: int) -> None:
    torch.manual_seed(0)
    x = (100 * torch.randn(2, channels, 5, 3)).to(memory_format=torch.channels_last).requires_grad_()
    ours, gradient = local_response_norm(x), torch.randn(2, channels, 5, 3)
    torch.testing.assert_close(ours, formula(x))
    torch.testing.assert_close(ours, F.local_response_norm(x, 5))
    (dx,) = torch.autograd.grad(ours, x, gradient)
    (expected,) = torch.autograd.grad(formula(x), x, gradient)
    torch.testing.assert_close(dx, expected)
    assert ours.is_contiguous(memory_format=torch.channels_last) and dx.is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_of_the_gradient_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    x = (100 * torch.randn(2, 7, 3, 2)).requires_grad_()
    seconds = []
    for norm in (local_response_norm, formula):
        (first,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-4)


def test_local_response_norm_of_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    x = (300 * torch.rand(2, 16, 4, 4)).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = local_response_norm(x)
    exact = formula(x.detach().float())
    assert y.dtype == torch.bfloat16 and torch.equal(y, exact.bfloat16())
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    wide = x.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(formula(wide).sum(), wide)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx.float(), expected, rtol=1e-2, atol=1e-5)


@torch.no_grad()
def test_the_first_convolution_sees_blue_first_from_0_to_255_less_the_mean() -> None:
    """Exactly the published preprocessing, from pixels as the data pipeline normalizes them."""
    trunk = build_trunk("googlenet_bvlc", "none", 3)
    pixels = torch.randint(0, 256, (2, 3, 64, 64))
    offset, gain = (
        torch.from_numpy(each)[:, None, None] for each in normalisation(Augmentation(mean=trunk.mean, std=trunk.std))
    )
    seen: list[Tensor] = []
    trunk.net.get_submodule("conv1").register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    trunk.net((pixels - offset) * gain)
    expected = pixels.flip(1) - torch.tensor([104, 117, 123])[:, None, None]
    assert torch.equal(seen[0], expected.float())
    assert torch.equal(seen[0].bfloat16().float(), seen[0])  # nothing is lost under autocast


def test_fusing_changes_neither_values_nor_names(net: GoogLeNet) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    before, names = net(x), list(net.state_dict())
    fused = fuse(net)
    torch.testing.assert_close(fused(x), before)
    assert list(fused.state_dict()) == names
    assert "forward" in fused.get_submodule("inception3a").__dict__ and "forward" in fused.get_submodule("maxpool1").__dict__
