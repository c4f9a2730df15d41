"""BN-Inception against the published table."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from xbm_app.models.inception import BN_BLOCKS, BNInception

# Channels after each block, from the table of the paper that published the network.
OUTPUTS = {"3a": 256, "3b": 320, "3c": 576, "4a": 576, "4b": 576, "4c": 608, "4d": 608, "4e": 1056, "5a": 1024, "5b": 1024}


@pytest.fixture(scope="module")
def net() -> BNInception:
    torch.manual_seed(0)
    return BNInception().eval()


def test_an_image_of_224_becomes_7_by_7_with_1024_channels(net: BNInception) -> None:
    with torch.no_grad():
        assert net(torch.zeros(1, 3, 224, 224)).shape == (1, 1024, 7, 7)


def test_parameters_are_as_many_as_published_less_the_classifier(net: BNInception) -> None:
    published, classifier = 11_295_240, 1000 * 1024 + 1000
    assert sum(each.numel() for each in net.parameters()) == published - classifier


@torch.no_grad()
def test_each_block_has_the_published_width_and_stride(net: BNInception) -> None:
    x = torch.rand(2, 192, 28, 28)
    side = 28
    for name in BN_BLOCKS:
        x = net._block(name, x)
        side = side // 2 if name in ("3c", "4e") else side
        assert x.shape == (2, OUTPUTS[name], side, side)


@torch.no_grad()
@pytest.mark.parametrize("side", [104, 112, 200])
def test_sizes_that_the_strides_do_not_divide_pass(net: BNInception, side: int) -> None:
    assert net(torch.zeros(1, 3, side, side + 7)).shape[:2] == (1, 1024)


def test_names_are_those_of_the_circulating_files(net: BNInception) -> None:
    names = set(net.state_dict())
    for layer in (
        "conv1_7x7_s2",
        "conv2_3x3_reduce",
        "conv2_3x3",
        "inception_3a_1x1",
        "inception_3a_3x3_reduce",
        "inception_3c_3x3",
        "inception_4e_double_3x3_reduce",
        "inception_4e_double_3x3_1",
        "inception_5b_double_3x3_2",
        "inception_5b_pool_proj",
    ):
        assert {f"{layer}.weight", f"{layer}.bias", f"{layer}_bn.weight", f"{layer}_bn.bias"} <= names
        assert {f"{layer}_bn.running_mean", f"{layer}_bn.running_var"} <= names
    assert not [name for name in names if "3c_1x1" in name or "4e_pool_proj" in name]


@torch.no_grad()
def test_the_first_convolution_sees_blue_first(net: BNInception) -> None:
    images = torch.rand(1, 3, 64, 64)
    seen = []
    handle = net.get_submodule("conv1_7x7_s2").register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    net(images)
    handle.remove()
    assert torch.equal(seen[0][:, 0], images[:, 2]) and torch.equal(seen[0][:, 2], images[:, 0])


@torch.no_grad()
@pytest.mark.parametrize(("name", "inputs", "pool"), [("3b", 256, "avg"), ("4c", 576, "avg"), ("5b", 1024, "max")])
def test_a_block_joins_1x1_3x3_double_3x3_and_pool_in_this_order(net: BNInception, name: str, inputs: int, pool: str) -> None:
    x = torch.rand(1, inputs, 5, 6)

    def conv(layer: str, y: Tensor) -> Tensor:
        layer = f"inception_{name}_{layer}"
        return net.get_submodule(layer + "_bn")(net.get_submodule(layer)(y)).relu()

    around = F.unfold(x, 3, padding=1).reshape(1, inputs, 9, 5, 6)  # all x are positive, so the zeros never win
    pooled = around.mean(2) if pool == "avg" else around.amax(2)
    double = conv("double_3x3_2", conv("double_3x3_1", conv("double_3x3_reduce", x)))
    branches = [conv("1x1", x), conv("3x3", conv("3x3_reduce", x)), double, conv("pool_proj", pooled)]
    torch.testing.assert_close(net._block(name, x), torch.cat(branches, 1))


@torch.no_grad()
def test_a_stride_block_passes_its_pooled_input_on(net: BNInception) -> None:
    x = torch.rand(2, 320, 28, 28)
    joined = net._block("3c", x)
    assert torch.equal(joined[:, -320:], F.max_pool2d(x, 3, stride=2, ceil_mode=True))
