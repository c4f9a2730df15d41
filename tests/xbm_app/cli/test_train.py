import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

import xbm as package
from tests.tiny import differences, draw_photos, set_options, tiny_config, xbm
from xbm.errors import InputError
from xbm_app.cli.train import parse_settings
from xbm_app.train.config import from_dict, load, save
from xbm_app.train.loop import train
from xbm_app.train.presets import DATASETS, preset


@pytest.mark.slow
def test_as_a_user_would(tmp_path):
    """Own photographs, from a folder to a model, its figures, vectors of other images, and pages to look at."""
    photos = draw_photos(tmp_path / "photos")
    other = draw_photos(tmp_path / "others", classes=2, each=3)

    def user(*words: object) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "xbm", *map(str, words)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = user("train", "--data", "photos", "--trunk", "small", *set_options())
    run = tmp_path / said.splitlines()[-1]  # its path is printed last
    assert run.parent == tmp_path / "runs" and "recall@1" in said
    result = json.loads((run / "result.json").read_text())
    assert f"{100 * result['recall@1']:.2f}" in said
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    config = load(run / "config.yaml")
    assert config.data.root == str(photos) and (config.recipe, config.memory.reduction) == ("auto", "balanced")

    said = user("evaluate", run, "--json", "figures/again.json")
    again = json.loads((tmp_path / "figures" / "again.json").read_text())
    assert again["recall@1"] == result["recall@1"] and f"{100 * result['recall@1']:.2f}" in said

    assert "6 embeddings of 12 dimensions" in user("embed", run, "others", "--out", "vectors.npz")
    with np.load(tmp_path / "vectors.npz") as file:
        vectors = file["embeddings"]
    found = package.load(run).embed(sorted(other.rglob("*.png")))
    np.testing.assert_allclose(vectors, found.numpy(), atol=1e-5)

    page = tmp_path / user("compare", run, run).splitlines()[-1]
    assert page.name == "compare.html" and page.stat().st_size > 10_000


def words(photos, out, *more):
    return ["train", "--data", photos, "--trunk", "small", "--out", out, "--quiet", *more]


def test_the_settings_given_are_the_settings_saved(own_photos, tmp_path):
    out = tmp_path / "run"
    changes = {"optim__iterations": 2, "loss__options": "{margin: 0.4}"}
    code, said, err = xbm(*words(own_photos, out, "--loss", "ms", "--no-memory", "--seed", 4, *set_options(**changes)))
    assert code == 2 and "unknown option of the multi_similarity loss 'margin'" in err and said == ""
    del changes["loss__options"]
    code, said, err = xbm(*words(own_photos, out, "--loss", "ms", "--no-memory", "--seed", 4, *set_options(**changes)))
    assert code == 0 and err == "" and said.splitlines()[-1] == str(out)
    wanted = tiny_config(own_photos, seed=4, loss__name="multi_similarity", memory__ratio=0.0, optim__iterations=2)
    assert load(out / "config.yaml") == wanted


PROXIES = ["--loss", "pml/ProxyAnchorLoss"]


def test_a_loss_with_proxies_trains_without_memory_and_goes_on_from_the_command_line(own_photos, tmp_path):
    out, more = tmp_path / "run", [*PROXIES, "--set", "loss.options.alpha=16", "--set", "loss.lr_factor=10", *set_options()]
    code, said, err = xbm(*words(own_photos, out, *more))
    assert code == 0 and err == "" and "recall@1" in said
    config = load(out / "config.yaml")
    assert (config.loss.name, config.loss.options, config.loss.lr_factor) == ("pml/ProxyAnchorLoss", {"alpha": 16.0}, 10.0)
    assert config.memory.ratio == 0 and (out / "report.html").exists()
    code, said, err = xbm("evaluate", out)
    result = json.loads((out / "result.json").read_text())
    assert code == 0 and f"{100 * result['recall@1']:.2f}" in said
    assert package.load(out).embed(sorted(own_photos.rglob("*.png"))[:2]).shape == (2, 12)

    half = words(own_photos, tmp_path / "half", *more, "--set", "optim.iterations=10")
    assert xbm(*half)[0] == 0
    save(config, tmp_path / "half" / "config.yaml")  # as if it had been stopped there
    assert xbm("train", "--resume", tmp_path / "half", "--quiet")[0] == 0
    assert differences(out, tmp_path / "half") == []


def test_the_run_of_such_a_loss_gets_a_folder_of_its_own(own_photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = xbm(
        "train", "--data", own_photos, "--trunk", "small", "--quiet", *PROXIES, *set_options(optim__iterations=1)
    )
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("_own_pml_ProxyAnchorLoss_no_memory_seed0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([*PROXIES, "--memory"], "pml/ProxyAnchorLoss compares anchors with no memory: omit --memory"),
        ([*PROXIES, "--set", "memory.ratio=0.5"], "so a memory has no effect: set memory.ratio=0, or pass --no-memory"),
        (["--set", "loss.name=pml/ArcFaceLoss"], "pml/ArcFaceLoss compares anchors only with its own proxies"),
        (["--loss", "pml/ProxyAncorLoss"], "unknown loss 'pml/ProxyAncorLoss': did you mean 'pml/ProxyAnchorLoss'?"),
        ([*PROXIES, "--set", "loss.options.alhpa=3"], "'alhpa': did you mean 'alpha'?"),
        ([*PROXIES, "--set", "loss.reduction=mean"], "averages over pairs in its own way: omit loss.reduction"),
        ([*PROXIES, "--set", "loss.lr_factor=-1"], "loss.lr_factor must be at least 0, got -1"),
        (["--loss", "ms", "--set", "loss.options.betta=3"], "'betta': did you mean 'beta'?"),
    ],
)
def test_what_such_a_loss_cannot_use_is_one_sentence_and_exit_code_2(own_photos, tmp_path, given, message):
    code, out, err = xbm(*words(own_photos, tmp_path / "run", *set_options(), *given))
    assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_loss_of_theirs_that_takes_a_memory_gets_one(own_photos, tmp_path):
    out = tmp_path / "run"
    code, _, err = xbm(*words(own_photos, out, "--loss", "pml/TripletMarginLoss", *set_options(optim__iterations=6)))
    assert code == 0, err
    assert load(out / "config.yaml").memory.ratio == 1 and (out / "report.html").exists()
    assert all(float(row["memory_loss"]) > 0 for row in csv.DictReader((out / "metrics.csv").open()))


def test_how_many_images_there_are_says_which_memory_suits_them(own_photos, tmp_path, monkeypatch):
    monkeypatch.setattr("xbm_app.train.loop.train", lambda config, *_, **__: pytest.fail(f"{config.memory.update}!"))
    words = ["train", "--data", own_photos, "--trunk", "efficientnet_lite0", "--out", tmp_path / "run"]
    for many, more, update in (
        (36, [], "queue"), (37, [], "moving_average"), (36, ["--set", "memory.update=backprop"], "backprop"),
    ):  # fmt: skip
        monkeypatch.setattr("xbm_app.train.presets.MANY", many)
        with pytest.raises(pytest.fail.Exception, match=f"{update}!"):
            xbm(*words, *more)


def test_a_saved_config_makes_the_same_run(own_photos, tmp_path):
    """The page of a run gives this command: the seed and all else must come from the file."""
    train(tiny_config(own_photos, seed=3, optim__iterations=6), tmp_path / "one", quiet=True)
    code, _, err = xbm("train", "--config", tmp_path / "one" / "config.yaml", "--out", tmp_path / "two", "--quiet")
    assert code == 0, err
    assert differences(tmp_path / "one", tmp_path / "two") == []
    code, _, _ = xbm(
        "train", "--config", tmp_path / "one" / "config.yaml", "--seed", 0, "--out", tmp_path / "three", "--quiet",
        "--set", "memory.ratio=0.5",
    )  # fmt: skip
    assert code == 0
    assert load(tmp_path / "three" / "config.yaml") == tiny_config(own_photos, optim__iterations=6, memory__ratio=0.5)


def test_resume_goes_on_with_the_runs_own_settings(own_photos, tmp_path):
    train(tiny_config(own_photos), tmp_path / "whole", quiet=True)
    train(tiny_config(own_photos, optim__iterations=10), tmp_path / "run", quiet=True)
    save(tiny_config(own_photos), tmp_path / "run" / "config.yaml")  # as if it had been stopped there
    code, said, err = xbm("train", "--resume", tmp_path / "run", "--quiet")
    assert code == 0 and said.splitlines()[-1] == str(tmp_path / "run"), err
    assert differences(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.parametrize(
    "more", [["glyphs"], ["--set", "optim.lr=1"], ["--no-memory"], ["--seed", "0"], ["--loss", "ms"], ["--data", "."]]
)
def test_resume_takes_no_other_settings(finished, more):
    code, _, err = xbm("train", "--resume", finished, *more)
    assert code == 2 and err == "error: --resume uses the settings of the run: omit all other options except --quiet\n"


def test_resume_of_a_folder_without_a_run(tmp_path):
    code, _, err = xbm("train", "--resume", tmp_path)
    assert code == 2 and err == f"error: {tmp_path} holds no run: pass the folder that `xbm train` printed\n"


def test_a_folder_in_use_is_left_alone(own_photos, finished):
    before = (finished / "config.yaml").read_bytes()
    code, _, err = xbm(*words(own_photos, finished, *set_options()))
    assert code == 2 and f"{finished} already holds a run: continue it with --resume {finished}, or use another --out" in err
    assert (finished / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to train on: choose a preset such as `xbm train glyphs`, or pass `--data DIR`"),
        (["glyph"], "unknown preset 'glyph': did you mean 'glyphs'?"),
        (["cars"], "the folder with the images of cars is not set: pass --root DIR"),
        (["own"], "the folder with the images of own is not set: pass --data DIR"),
        (["cars", "--data", "."], "--data trains on your own images and takes no preset"),
        (["glyphs", "--loss", "contrastve"], "unknown loss 'contrastve': did you mean 'contrastive'?"),
        (["glyphs", "--trunk", "smal"], "unknown trunk 'smal': did you mean 'small'?"),
        (["glyphs", "--recipe", "papr"], "unknown recipe 'papr': did you mean 'paper'?"),
        (["glyphs", "--set", "memory.ration=1"], "unknown setting 'memory.ration': did you mean 'memory.ratio'?"),
        (["glyphs", "--set", "memory.ratio"], "--set takes key=value"),
        (["glyphs", "--set", "log.every=0"], "log.every must be at least 1, got 0"),
        (["glyphs", "--set", "batch.size=33"], "batch.size=33 must be a multiple of batch.per_class=4"),
        (["--data", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["--config", "/no/such.yaml"], "/no/such.yaml does not exist"),
        (["cars", "--config", "x.yaml"], "--config contains all settings"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(given, message, tmp_path, monkeypatch):
    monkeypatch.setenv("XBM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("xbm_app.data.glyphs.read_glyphs", lambda size: small_glyphs())
    code, out, err = xbm("train", *given, "--out", tmp_path / "run")
    assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "run" / "config.yaml").exists()


def small_glyphs():
    from xbm_app.data.images import Dataset, ImageSet, Protocol

    images = ImageSet(
        "glyphs", np.repeat(np.arange(20), 3), [str(k) for k in range(20)], pixels=np.zeros((60, 32, 32), np.uint8)
    )
    return Dataset("glyphs", images, (Protocol("test", images, (1,)),))


def test_problems_are_listed_and_can_be_skipped(tmp_path):
    photos = draw_photos(tmp_path / "photos")
    (photos / "class_01" / "2.png").write_bytes(b"")
    code, _, err = xbm(*words(photos, tmp_path / "run", *set_options(optim__iterations=1)))
    assert code == 2 and "class_01/2.png" in err and "add --skip-problems" in err
    code, _, err = xbm(*words(photos, tmp_path / "run", "--skip-problems", *set_options(optim__iterations=1)))
    assert code == 0
    rows = list(csv.DictReader((tmp_path / "run" / "split.csv").open()))
    assert len(rows) == 71 and "class_01/2.png" not in {row["path"] for row in rows}


def test_a_run_without_a_name_gets_a_dated_one(own_photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, err = xbm(
        "train", "--data", own_photos, "--trunk", "small", "--quiet", *set_options(optim__iterations=1, seed=7)
    )
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert said.splitlines()[-1] == f"runs/{run.name}" and run.name.endswith("_own_contrastive_seed7")


def test_settings_are_cut_at_the_first_equals():
    assert parse_settings(["a.b = c=d", "e="]) == {"a.b": "c=d", "e": ""}
    assert parse_settings(None) == {}


def test_no_memory_and_a_size_of_it_contradict_each_other():
    code, _, said = xbm("train", "glyphs", "--no-memory", "--set", "memory.ratio=0.5")
    assert code == 2 and "--no-memory sets memory.ratio=0: omit one of the two" in said


@pytest.mark.parametrize("setting", ["recipe=paper", "preset = cars"])
def test_what_would_only_rename_the_run_is_refused(setting):
    with pytest.raises(InputError, match="would only rename the run"):
        parse_settings([setting])


def rows_of(out):
    return {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 5}


def test_the_list_follows_the_options():
    code, out, _ = xbm("presets")
    assert code == 0 and "moving_average, m 0.9" in rows_of(out)["cars"] and "recipe `auto`" in out
    code, out, _ = xbm("presets", "--loss", "ms", "--trunk", "resnet50", "--recipe", "official")
    assert code == 0 and "resnet50" in rows_of(out)["cars"] and "128" in rows_of(out)["cars"] and "recipe `official`" in out
    assert "glyphs" not in rows_of(out)


def test_the_list_holds_every_preset_with_its_values():
    code, out, _ = xbm("presets", "--recipe", "paper")
    assert code == 0
    rows = rows_of(out)
    assert set(DATASETS) <= rows.keys()
    assert all(word in rows["cars"] for word in ("googlenet", "512", "0.0001", "1400", "2000", "backprop, α 0.1, m 0.9"))
    assert all(word in rows["inshop"] for word in ("0.0003", "24000", "34000", "0.2", "queue", "1000"))
    for word in ("contrastive", "triplet", "ms", "resnet50", "bn_inception", "official"):
        assert word in out


def test_the_facts_of_the_released_code_stand_beside_the_settings():
    code, out, _ = xbm("presets", "cars", "--recipe", "official")
    assert code == 0 and from_dict(yaml.safe_load(out)) == preset("cars", recipe="official")
    lines = {line.partition(":")[0].strip(): line for line in out.splitlines()}
    assert lines["schedule"].split("#")[0].strip() == "schedule: plateau"
    assert "mode max, threshold 0.001, patience 4, cooldown 2, floor lr / 20" in lines["schedule"]
    assert lines["update"].endswith("# queue only") and "test list" in lines["holdout"] and "55,000 rows" in lines["size"]
    assert out.count("as published, the released code") == 3 and "KeyError at iteration 1,000" in out and "1 - bool" in out
    code, out, _ = xbm("presets", "cub", "--recipe", "paper")
    assert from_dict(yaml.safe_load(out)) == preset("cub") and out.count("Exception:") == 4
    assert "#" not in xbm("presets", "cub")[1]


def test_one_preset_is_yaml_that_train_takes(tmp_path):
    code, out, _ = xbm("presets", "cars", "--loss", "ms", "--trunk", "resnet50", "--recipe", "official")
    assert code == 0
    assert from_dict(yaml.safe_load(out)) == preset("cars", "ms", "resnet50", "official")
    (tmp_path / "mine.yaml").write_text(out)
    assert load(tmp_path / "mine.yaml").model.dim == 128
    code, out, _ = xbm("presets", "glyphs", *PROXIES)
    assert code == 0 and from_dict(yaml.safe_load(out)).memory.ratio == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["carz"], "did you mean 'cars'"),
        (["--recipe", "x"], "unknown recipe"),
        (["cars", "--loss", "m"], "unknown loss"),
        (["cars", "--trunk", "x"], "unknown trunk"),
    ],
)
def test_unknown_names(words, message):
    code, _, err = xbm("presets", *words)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Calls `xbm train` up to the run; returns its config and what was said."""

    def call(*more):
        configs = []

        def stop(config, *_, **__):
            configs.append(config)
            raise InputError("stopped")

        monkeypatch.setattr("xbm_app.train.loop.train", stop)
        monkeypatch.setattr("xbm_app.train.trials.choose", lambda config, *_: config)
        said = xbm("train", *more, "--out", tmp_path / "run").err
        return configs[0], said.removesuffix("error: stopped\n")

    return call


def test_small_images_are_not_blown_up(chosen, tmp_path):
    icons, photos = (
        draw_photos(tmp_path / "icons", classes=32, each=1, side=64),
        draw_photos(tmp_path / "photos", classes=32, each=1, side=120),
    )
    for trunk, crop in (("small", 64), ("resnet50", 128), ("timm/vit_tiny_patch16_224", 128)):
        config, said = chosen("--data", icons, "--trunk", trunk)
        assert (config.data.crop, config.data.resize) == (crop, round(crop * 8 / 7))
        assert said == f"training on crops of {crop} pixels (data.crop), since most images are 64 pixels or smaller\n"
    scratch, _ = chosen("--data", icons, "--trunk", "resnet50", "--set", "model.weights=none")
    assert scratch.data.crop == 64
    own, said = chosen("--data", icons, "--trunk", "resnet50", "--set", "data.crop=200")
    assert own.data.crop == 200 and said == ""
    large, said = chosen("--data", photos, "--trunk", "resnet50")
    assert (large.data.crop, large.data.resize, said) == (224, 256, "")
    _, said = chosen("--data", photos, "--trunk", "small")
    assert said == "training on crops of 64 pixels (data.crop), the size that the small network is made for\n"
    short, _ = chosen("--data", photos, "--trunk", "resnet50", "--set", "optim.iterations=100")
    assert short.log.every == 5 and large.log.every == 100


def test_a_timm_trunk_gets_the_input_and_the_pooling_that_it_was_trained_with(chosen, tmp_path):
    photos = draw_photos(tmp_path / "photos", classes=4, each=2, side=300)
    config, _ = chosen("--data", photos, "--trunk", "timm/vit_small_patch14_dinov2.lvd142m")
    assert (config.data.crop, config.data.resize, config.data.interpolation) == (224, 256, "bicubic")
    assert config.model.pooling == "own" and config.memory.update == "moving_average"
    config, _ = chosen("--data", photos, "--trunk", "timm/mobilevit_xxs.cvnets_in1k")
    assert (config.data.crop, config.data.resize) == (256, 293)


def test_the_head_of_a_frozen_trunk_does_not_sum_its_negatives(chosen, own_photos):
    words = ("--data", own_photos, "--trunk", "resnet50", "--set", "model.freeze=trunk")
    config, _ = chosen(*words)
    assert (config.memory.reduction, config.optim.lr) == ("balanced", 1e-3)
    config, _ = chosen(*words, "--set", "optim.lr=0.01")
    assert (config.memory.reduction, config.optim.lr) == ("balanced", 0.01)
    config, _ = chosen(*words, "--recipe", "paper")
    assert (config.memory.reduction, config.optim.lr) == (None, 1e-4)


def test_without_weights_and_without_a_network_a_small_net_is_trained_and_said(chosen, own_photos, monkeypatch):
    monkeypatch.setattr("xbm_app.models.trunks.find_spec", lambda _: None)
    monkeypatch.setattr("xbm_app.models.trunks.can_fetch", lambda _: False)
    config, said = chosen("--data", own_photos)
    assert (config.model.trunk, config.model.weights, config.optim.lr) == ("small", "none", 1e-3)
    assert said.startswith("no pretrained weights are installed") and config.memory.reduction == "balanced"
    monkeypatch.setattr("xbm_app.models.trunks.can_fetch", lambda _: True)
    config, said = chosen("--data", own_photos)
    assert (config.model.trunk, config.model.weights) == ("efficientnet_lite0", "imagenet") and "no pretrained" not in said


def test_a_size_that_a_trunk_cannot_take_is_one_sentence(own_photos, tmp_path):
    crop = set_options(data__resize=110, data__crop=100, model__weights="none", optim__iterations=1)
    code, _, err = xbm("train", "--data", own_photos, "--trunk", "timm/test_vit", "--out", tmp_path / "run", *crop)
    assert code == 2 and err == "error: timm/test_vit takes no images of data.crop=100: set data.crop=96\n"
