"""Models of timm: the input that they state, sizes that they take, their own pooling, and whether their weights can be had."""

import socket
from pathlib import Path

import pytest
import timm
import torch

from xbm.errors import InputError
from xbm_app.models import build_model
from xbm_app.models.timm_trunks import can_fetch, side_of, timm_input, usable_side
from xbm_app.models.trunks import build_trunk, lite0_weights_at_hand

DINO = "timm/vit_small_patch14_dinov2.lvd142m"


def test_the_input_is_the_one_that_timm_states():
    assert timm_input(DINO) == (518, 1.0, "bicubic")
    assert timm_input("timm/vgg11.tv_in1k") == (224, 0.875, "bilinear")
    with pytest.raises(InputError, match="did you mean 'resnet18'"):
        timm_input("timm/resnet_18")


@pytest.mark.parametrize(
    ("name", "wanted", "side"),
    [
        (DINO, 224, 224),  # 16 patches of 14 pixels
        (DINO, 64, 70),
        ("timm/test_vit", 160, 160),
        ("timm/test_vit", 100, 96),
        ("timm/test_resnet", 61, 61),  # convolutions take any size
        ("timm/hiera_tiny_224", 128, 224),  # fixed
        ("timm/maxvit_rmlp_pico_rw_256", 200, 256),  # its windows divide no other size nearby
    ],
)
def test_a_size_that_a_model_cannot_take_becomes_the_nearest_that_it_can(name: str, wanted: int, side: int):
    assert usable_side(name, wanted) == side


def test_a_transformer_built_for_another_size_resamples_its_trained_positions_once(tmp_path: Path):
    theirs = timm.create_model("test_vit", num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    native = build_trunk("timm/test_vit", str(tmp_path / "vit.pth"), 3, "own", side=160).net.state_dict()
    assert torch.equal(native["pos_embed"], theirs.state_dict()["pos_embed"])
    trunk = build_trunk("timm/test_vit", str(tmp_path / "vit.pth"), 3, "own", side=64)
    theirs.set_input_size(img_size=(64, 64))
    theirs.eval(), trunk.net.eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(trunk.net(images), theirs(images))
    assert trunk.net.state_dict()["pos_embed"].shape[1] == 16 + trunk.prefix and side_of(trunk.net) == 160


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "vit_tiny_patch16_224"])
def test_its_own_pooling_is_that_of_the_model(name: str):
    torch.manual_seed(3)
    theirs = timm.create_model(name, num_classes=0).eval()
    model = build_model(f"timm/{name}", 5, "own", "none", side=64).eval()
    if hasattr(theirs, "set_input_size"):
        theirs.set_input_size(img_size=(64, 64))
    theirs.load_state_dict(model.trunk.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.features(images), theirs(images))
    assert model.features(images).shape == (2, model.head.in_features)


def test_weights_can_be_had_if_installed_or_if_the_hub_answers(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not can_fetch("timm/test_resnet")
    monkeypatch.setattr("xbm_app.models.trunks.find_spec", lambda _: None)
    assert not lite0_weights_at_hand()
    monkeypatch.setattr("xbm_app.models.trunks.find_spec", lambda name: name)
    assert lite0_weights_at_hand()
    monkeypatch.setenv("HTTPS_PROXY", "http://somewhere")  # it may answer, whatever a direct connection says
    assert can_fetch("timm/test_resnet")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not can_fetch("timm/test_resnet")
