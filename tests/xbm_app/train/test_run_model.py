"""A frozen trunk: its features are computed once, and training on them is training the head on the images."""

import os
import random
import zlib

import numpy as np
import pytest
import torch

from tests.tiny import same, tiny_config
from tests.xbm_app.damage import flipped, zeroed
from xbm.errors import InputError
from xbm_app.files import read_checkpoint
from xbm_app.models import EmbeddingModel, build_model, freeze
from xbm_app.models.embedding import layers_of
from xbm_app.train.dataset import begin_run
from xbm_app.train.load import evaluate_run
from xbm_app.train.loop import train
from xbm_app.train.state import RunState


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The number of images of every forward pass through a trunk."""
    seen: list[int] = []
    plain = EmbeddingModel._pool

    def counted(self, images):
        if images.dim() == 4 and images.device.type != "meta":  # where a crop is checked
            seen.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(EmbeddingModel, "_pool", counted)
    return seen


def test_each_image_passes_the_trunk_once_and_a_shared_folder_spares_the_next_run(photos, tmp_path, passes):
    config = tiny_config(photos, model__freeze="trunk", data__features=str(tmp_path / "shared"))
    result = train(config, tmp_path / "first", quiet=True)
    assert sum(passes) == 72  # 36 training images and as many test images
    assert len(list((tmp_path / "shared").glob("*.npz"))) == 2
    state = read_checkpoint(tmp_path / "first" / "checkpoints" / "last.pt")
    passes.clear()
    again = train(
        tiny_config(photos, model__freeze="trunk", data__features=str(tmp_path / "shared")), tmp_path / "next", quiet=True
    )
    assert passes == [] and again["recall@1"] == result["recall@1"]
    assert same(state["model"], read_checkpoint(tmp_path / "next" / "checkpoints" / "last.pt")["model"]) == []
    for path, damage in zip((tmp_path / "shared").glob("*.npz"), (flipped, zeroed)):
        path.write_bytes(damage(path.read_bytes(), random.Random(0)))  # a damaged file is computed again
    train(tiny_config(photos, model__freeze="trunk", data__features=str(tmp_path / "shared")), tmp_path / "third", quiet=True)
    assert sum(passes) == 72


def read_features(path):
    with np.load(path) as arrays:
        return arrays["features"]


def test_a_killed_run_keeps_the_features_of_whole_batches(photos, tmp_path, passes, monkeypatch):
    draw = random.Random(0)
    monkeypatch.setattr("xbm_app.train.run_model.EMBED_BATCH", 8)
    config = tiny_config(photos, model__freeze="trunk", data__features=str(tmp_path / "shared"))
    train(config, tmp_path / "whole", quiet=True)
    (finished,) = (tmp_path / "shared").glob("*train*.npz")
    wanted = read_features(finished)
    whole = [part.tobytes() + zlib.crc32(part.tobytes()).to_bytes(4, "little") for part in (wanted[:8], wanted[8:16])]
    for left, rest in ((b"".join(whole) + b"part of a row", [8, 8, 4]), (whole[0] + flipped(whole[1], draw), [8, 8, 8, 4])):
        finished.unlink()
        finished.with_suffix(".unfinished").write_bytes(left)
        passes.clear()
        train(config, tmp_path / f"again{len(rest)}", quiet=True)
        assert passes == rest and np.array_equal(read_features(finished), wanted)
    assert not list((tmp_path / "shared").glob("*.unfinished"))


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system follows every link")
def test_a_planted_link_in_place_of_unfinished_features_is_not_followed(photos, tmp_path):
    config = tiny_config(photos, model__freeze="trunk", data__features=str(tmp_path / "shared"), optim__iterations=1)
    train(config, tmp_path / "first", quiet=True)
    (finished,) = (tmp_path / "shared").glob("*train*.npz")
    finished.unlink()
    (tmp_path / "precious").write_bytes(b"precious")
    finished.with_suffix(".unfinished").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="is a link"):
        train(config, tmp_path / "second", quiet=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_other_weights_or_images_have_other_features(photos, tmp_path):
    shared = {"model__freeze": "trunk", "data__features": str(tmp_path / "shared"), "optim__iterations": 1}
    for number, changes in enumerate(({}, {"seed": 1}, {"data__resize": 18})):
        train(tiny_config(photos, **shared, **changes), tmp_path / str(number), quiet=True)
        assert len(list((tmp_path / "shared").glob("*.npz"))) == 2 * (number + 1)


def test_only_the_head_moves_and_a_loaded_model_scores_the_same(photos, tmp_path):
    config = tiny_config(photos, model__freeze="trunk", optim__lr=0.03)
    result = train(config, tmp_path / "run", quiet=True)
    fresh = RunState(config, begin_run(config, tmp_path / "run"), tmp_path / "run").model.state_dict()
    trained = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["model"]
    moved = {name for name in fresh if not torch.equal(fresh[name], trained[name])}
    assert moved == {"head.weight", "head.bias"}
    assert evaluate_run(tmp_path / "run")["protocols"] == result["protocols"]  # from images, through the whole model


def test_a_feature_is_what_the_model_has_before_its_head(photos, tmp_path):
    config = tiny_config(photos, model__freeze="trunk")
    run = RunState(config, begin_run(config, tmp_path / "run"), tmp_path / "run")
    images = run.dataset.train
    plain = RunState(tiny_config(photos), run.dataset, tmp_path / "plain")
    run.model.eval()
    indices = np.arange(36)
    assert torch.equal(run.model(run.data.feed.test(indices)), run.model(plain.data.feed.test(indices)))
    assert torch.equal(run.data.feed.train(indices[:5], step=3), run.data.feed.test(indices[:5]))
    assert run.data.feed.labels.tolist() == images.labels.tolist()


def test_frozen_blocks_get_no_gradient_keep_their_statistics_and_skip_the_backward_pass():
    model = build_model("small", dim=7, weights="none", channels=1)
    freeze(model, "blocks:2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval(), model.train()
    frozen = [p for layer in layers_of(model.trunk)[:3] for _, p in layer]
    inner = model.trunk.blocks[1](model.trunk.blocks[0](torch.randn(5, 1, 32, 32)))
    assert not inner.requires_grad  # so there is nothing to go back through
    model(torch.randn(5, 1, 32, 32)).square().mul(torch.arange(7)).sum().backward()
    assert frozen and all(p.grad is None for p in frozen)
    assert all(p.grad is not None for name, p in model.named_parameters() if "blocks.2" in name or "blocks.3" in name)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "blocks.0" in name or "blocks.1" in name)
    assert not torch.equal(before["trunk.blocks.3.2.running_mean"], after["trunk.blocks.3.2.running_mean"])


@pytest.mark.parametrize(
    ("trunk", "count", "stem"),
    [("resnet50", 5, "bn1.weight"), ("googlenet", 13, None), ("efficientnet_lite0", 17, "conv_stem.weight"),
     ("timm/test_vit", 7, "pos_embed"), ("small", 5, None)],
)  # fmt: skip
def test_layers_go_from_the_stem_over_the_blocks_and_hold_every_parameter_once(trunk, count, stem):
    net = build_model(trunk, 5, weights="none", channels=1 if trunk == "small" else 3).trunk
    layers = layers_of(net)
    names = [name for layer in layers for name, _ in layer]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert len(layers) == count and (stem in [name for name, _ in layers[0]] if stem else layers[0] == [])
