"""Runs on tar shards and data sets of Hugging Face, read in a stream or at any place."""

import json

import numpy as np
import pytest
import torch

import xbm as package
from tests.tiny import differences, set_options, xbm
from tests.xbm_app.data.shard_files import picture, write_shard
from tests.xbm_app.train.interrupted import Killed, ended_in_checkpoint
from xbm_app.train.config import load
from xbm_app.train.dataset import read_data, sampler_of
from xbm_app.train.loop import train


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Nine classes of eight images in random order, in three shards, and four classes to test on."""
    root = tmp_path_factory.mktemp("shards")
    labels = np.random.default_rng(0).permutation(np.arange(72) % 9).tolist()
    for shard in range(3):
        write_shard(root / f"train-{shard}.tar", labels[24 * shard : 24 * shard + 24], first=24 * shard)
    write_shard(root / "test-0.tar", [100 + number % 4 for number in range(12)], first=72)
    return root


def words(shards, out, **changes):
    return ["train", "--data", shards, "--trunk", "small", "--out", out, *set_options(batch__buffer=24, **changes)]


def test_a_run_on_shards_is_a_stream_that_continues_bit_for_bit(shards, tmp_path):
    code, out, err = xbm(*words(shards, tmp_path / "whole"))
    assert code == 0, err
    config = load(tmp_path / "whole" / "config.yaml")
    assert (config.batch.sampler, config.batch.buffer) == ("stream", 24) and "recall@1" in out
    assert not (tmp_path / "whole" / "split.csv").exists()

    def end():
        raise Killed

    with pytest.raises(Killed), ended_in_checkpoint(2, end):  # the first checkpoint is at iteration 7
        train(config, tmp_path / "ended", quiet=True)
    state = torch.load(tmp_path / "ended" / "checkpoints" / "last.pt", weights_only=True)["stream"]
    assert state["place"][0] == 7 and state["waiting"].numel() + state["groups"].numel() > 0
    train(config, tmp_path / "ended", resume=True, quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "ended") == []

    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    code, _, err = xbm("evaluate", tmp_path / "whole", "--json", tmp_path / "again.json")
    assert code == 0, err
    assert json.loads((tmp_path / "again.json").read_text())["recall@1"] == result["recall@1"]
    assert (tmp_path / "whole" / "report.html").read_text().count("<img") > 0
    assert package.load(tmp_path / "whole").classes == [str(k) for k in range(9)]


def test_the_state_in_the_checkpoint_decides_the_batches(shards, tmp_path):
    config = load_config(shards, tmp_path)
    images = read_data(config.data).train
    whole, resumed = sampler_of(images, config), sampler_of(images, config)
    batches = [whole.batch(step).tolist() for step in range(20)]
    resumed.load_state(whole.state(5))
    assert [resumed.batch(step).tolist() for step in range(5, 20)] == batches[5:]
    shown = [int(images.labels[index]) for index in batches[5]]
    assert shown[0::2] == shown[1::2] and len(set(shown)) == 4


def load_config(shards, tmp_path):
    xbm(*words(shards, tmp_path / "run", optim__iterations=1))
    return load(tmp_path / "run" / "config.yaml")


def test_shards_can_be_read_at_any_place_and_other_data_in_no_order(shards, own_photos, tmp_path):
    code, _, err = xbm(*words(shards, tmp_path / "exact", batch__sampler="pk", optim__iterations=2))
    assert code == 0 and load(tmp_path / "exact" / "config.yaml").batch.sampler == "pk", err
    code, _, err = xbm(*words(own_photos, tmp_path / "photos", batch__sampler="stream"))
    assert code == 2 and "batch.sampler=stream reads shards in their order" in err
    code, _, err = xbm(*words(shards, tmp_path / "checked"), "--skip-problems")
    assert code == 2 and "omit it" in err


def test_shards_that_have_changed_are_not_resumed(shards, tmp_path):
    own = tmp_path / "own"
    for number in range(3):
        write_shard(own / f"{number}.tar", [k % 9 for k in range(27)], first=27 * number)
    assert xbm(*words(own, tmp_path / "run", optim__iterations=2)).code == 0
    write_shard(own / "1.tar", [k % 9 for k in range(27)], first=200)
    code, _, err = xbm("train", "--resume", tmp_path / "run")
    assert code == 2 and "are not those that this run began with" in err


def test_a_data_set_of_hugging_face_trains_and_continues(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    labels = [k % 8 for k in range(48)]
    images = [{"bytes": picture(number), "path": None} for number in range(48)]
    datasets.Dataset.from_dict({"image": images, "species": labels}).save_to_disk(tmp_path / "birds")
    data = f"hf:{tmp_path / 'birds'}"
    settings = set_options(optim__iterations=9, data__label="species")
    code, out, err = xbm("train", "--data", data, "--trunk", "small", "--out", tmp_path / "run", *settings)
    assert code == 0 and "recall@1" in out, err
    config = load(tmp_path / "run" / "config.yaml")
    assert (config.data.root, config.batch.sampler) == (data, "pk")
    assert xbm("train", "--resume", tmp_path / "run", "--quiet").code == 0
    assert xbm("evaluate", tmp_path / "run").code == 0
    assert xbm("prepare", data, "--out", tmp_path / "store", "--label", "species", "--resize", 16).code == 0
