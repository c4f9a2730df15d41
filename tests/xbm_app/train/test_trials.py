"""The choice of an optimizer for pretrained transformers, on held-out classes of the data at hand."""

import json

import pytest
import safetensors.torch
import timm
import torch

import xbm
from tests.tiny import differences, draw_photos
from tests.tiny import xbm as command
from xbm.errors import DivergedError, InputError
from xbm_app.train import config as configs
from xbm_app.train import loop, trials
from xbm_app.train.config import override
from xbm_app.train.presets import preset

VIT = "timm/test_vit"
TINY = {
    "device": "cpu", "data.crop": 32, "data.resize": 32, "model.dim": 8, "batch.size": 16, "batch.per_class": 2,
    "optim.iterations": 10, "log.every": 5, "log.trackers": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a file count as pretrained."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    safetensors.torch.save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """42 classes of four images: 21 to train on."""
    return draw_photos(tmp_path_factory.mktemp("pictures") / "photos", classes=42, each=4, side=32)


def train(photos, out, weights, changes=None, **options):
    torch.set_num_threads(1)
    return xbm.train(photos, out=out, trunk=VIT, set={**TINY, "model.weights": weights, **(changes or {})}, **options)


@pytest.fixture(scope="module")
def chosen(photos, weights, tmp_path_factory):
    return train(photos, tmp_path_factory.mktemp("run") / "run", weights, quiet=True)


def test_auto_compares_on_held_out_classes_and_records_what_it_chose(chosen):
    found = json.loads((chosen.folder / "trials.json").read_text())
    assert [each["candidate"] for each in found["compared"]] == list(trials.CANDIDATES)
    assert {each["iterations"] for each in found["compared"]} == {2}
    best = max(found["compared"], key=lambda each: each["map@r"])
    assert found["chosen"] == best["candidate"] and 0 < best["map@r"] <= 1
    optim, settings = chosen.config.optim, trials.CANDIDATES[found["chosen"]]
    assert {f"optim.{name}": value for name, value in vars(optim).items()}.items() >= settings.items()
    assert optim.iterations == 10 and chosen.config.data.holdout == 0
    assert chosen.result["data"]["train_classes"] == 21, "the run itself trains on all training classes"
    assert not (chosen.folder / "trials").exists() and (chosen.folder / "split.csv").exists()


def test_the_best_score_decides(photos, weights, tmp_path, monkeypatch):
    held_out = []

    def scored(config, folder, *_, **__):
        if config.data.holdout == 0:
            raise InputError("the run")
        held_out.append(config)
        if config.optim.lr == 3e-5:
            raise DivergedError(1, None)
        return {"recall@1": 0.5, "map@r": 0.4 if config.optim.name == "adam" else 0.3}

    monkeypatch.setattr(loop, "train", scored)
    monkeypatch.setattr(trials, "train", scored)
    with pytest.raises(InputError, match="the run"):
        train(photos, tmp_path / "run", weights, quiet=True)
    assert json.loads((tmp_path / "run" / "trials.json").read_text())["chosen"] == "preset"
    config = configs.load(tmp_path / "run" / "config.yaml")
    assert (config.optim.name, config.optim.schedule, config.optim.lr) == ("adam", "step", 1e-4)
    assert [each.data.holdout for each in held_out] == [0.2] * 3
    assert [each.optim.decay_at for each in held_out] == [(), (), (280,)], "a fifth of the preset's 1,400"


@pytest.mark.slow
def test_a_run_that_is_stopped_between_its_trials_goes_on_there(chosen, photos, weights, tmp_path, monkeypatch):
    calls, real = [], trials.train

    def stopped(config, folder, **options):
        calls.append(folder.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(config, folder, **options)

    monkeypatch.setattr(trials, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(photos, tmp_path / "run", weights, quiet=True)
    again = xbm.train(resume=tmp_path / "run", quiet=True)
    assert calls == ["0", "1", "1", "2"]
    assert again.config == chosen.config and differences(again.folder, chosen.folder) == []


def test_nothing_is_compared_where_the_choice_is_made_already(photos, weights):
    pretrained = override(preset("own", trunk=VIT, recipe="auto"), {"model.weights": weights})
    assert trials.has_choice(pretrained, {"optim.iterations": 400, "model.freeze": "blocks:1"})
    assert not trials.has_choice(pretrained, {"optim.lr": 1e-3})
    assert not trials.has_choice(pretrained, {"model.trunk_lr": 0.1})
    for changes in ({"model.weights": "none"}, {"model.freeze": "trunk"}, {"model.trunk": "timm/resnet10t"}):
        assert not trials.has_choice(override(pretrained, changes), {})
    assert not trials.has_choice(preset("own", trunk=VIT, recipe="paper"), {})


def test_few_classes_get_the_first_candidate_without_trials(weights, tmp_path):
    few = draw_photos(tmp_path / "few", classes=8, each=4, side=32)
    run = train(few, tmp_path / "run", weights, {"batch.size": 8, "optim.iterations": 40}, quiet=True)
    assert json.loads((run.folder / "trials.json").read_text()) == {"chosen": "adamw 1e-4", "compared": []}
    assert (run.config.optim.name, run.config.optim.warmup, run.config.optim.layer_decay) == ("adamw", 2, 0.75)


def test_it_is_said_beforehand_and_without_memory_too(photos, weights, tmp_path):
    settings = [word for key, value in {**TINY, "model.weights": weights}.items() for word in ("--set", f"{key}={value}")]
    words = ["train", "--data", photos, "--trunk", VIT, "--no-memory", *settings, "--out", tmp_path / "run"]
    code, _, err = command(*words)
    assert code == 0, err
    assert "comparing 3 ways to train a transformer on held-out classes, 2 iterations each" in err
    assert "1 of 3: adamw 1e-4\n" in err and "\nchosen: " in err
    config = configs.load(tmp_path / "run" / "config.yaml")
    assert (config.recipe, config.memory.ratio) == ("auto", 0)
    assert command(*words).err.startswith(f"error: {tmp_path / 'run'} already holds a run")
