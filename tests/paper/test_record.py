import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paper import record
from paper.record import Record, Records, file_name, identity, key, labels_file, read_labels, runs_of, write_labels
from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.train.config import Config, override
from xbm_app.train.presets import preset

CARS = preset("cars", trunk="efficientnet_lite0")


def result(config: Config, **more) -> dict:
    return {"config": identity(config), "scores": {"test": {"recall@1": 0.5}}, **more}


def test_a_result_knows_nothing_of_the_machine(tmp_path):
    placed = override(CARS, {"data.root": "/home/me/cars", "device": "cuda", "model.weights": "/home/me/w/r50.safetensors"})
    there = identity(placed)
    assert "/home" not in json.dumps(there) and there["model.weights"] == "r50.safetensors"
    elsewhere = override(placed, {"data.root": "/mnt/x", "device": "cpu", "model.weights": "/mnt/r50.safetensors"})
    assert identity(elsewhere) == there


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"optim.lr": 2e-4}, {"data.holdout": 0.2}, {"memory.ratio": 0.5}, {"batch.size": 32}, {"log.every": 10}],
)
def test_what_can_change_a_figure_makes_another_run(change):
    other = override(override(CARS, {"memory.update": "queue"}), change)
    assert key(identity(other)) != key(identity(override(CARS, {"memory.update": "queue"})))
    assert file_name(identity(other)) != file_name(identity(CARS))
    assert "/" not in file_name({**identity(CARS), "loss.name": "pml/ProxyAnchorLoss"})


def test_how_a_memory_is_kept_that_is_not_there_makes_no_other_run():
    off = override(CARS, {"memory.ratio": 0.0})
    assert identity(off) == identity(override(off, {"memory.update": "queue", "memory.start": 7, "memory.batch_weight": 1.0}))
    assert not record.APART & identity(off).keys()
    queue = override(CARS, {"memory.update": "queue"})
    assert identity(queue) == identity(override(queue, {"memory.alpha": 0.7, "memory.momentum": 0.3}))
    average = override(CARS, {"memory.update": "moving_average"})
    assert identity(average) == identity(override(average, {"memory.alpha": 0.7}))
    assert identity(average) != identity(override(average, {"memory.momentum": 0.3}))


def test_reductions_of_a_loss_that_has_but_one_make_no_other_run(tmp_path):
    mined = override(CARS, {"loss.name": "multi_similarity"})
    others = {"loss.reduction": "mean", "memory.reduction": "balanced"}
    assert identity(mined) == identity(override(mined, others))
    assert identity(CARS) != identity(override(CARS, others))
    (tmp_path / "old.json").write_text(json.dumps({"format": 1, **result(mined), "config": {**identity(mined), **others}}))
    assert Records(tmp_path).find(identity(mined)) is not None


def test_a_fold_counts_where_classes_are_held_out():
    held = override(CARS, {"data.holdout": 0.2})
    assert identity(CARS) == identity(override(CARS, {"data.fold": 1}))
    assert key(identity(held)) != key(identity(override(held, {"data.fold": 1})))
    older = {name: value for name, value in identity(held).items() if name != "data.fold"}
    assert key(older) == key(identity(held)) and file_name(older) == file_name(identity(held))


def test_result_files_are_named_by_what_they_hold():
    files = sorted((Path(__file__).parents[2] / "paper" / "results").glob("*.json"))
    assert files and [file.name for file in files] == [file_name(json.loads(file.read_text())["config"]) for file in files]


def test_what_is_written_is_found_again_and_by_others(tmp_path):
    records = Records(tmp_path)
    path = records.write(result(CARS))
    assert path.name.startswith("cars_efficientnet_lite0_contrastive_backprop_seed0_") and len(records) == 1
    assert Records(tmp_path).find(identity(CARS)).score() == 0.5
    assert records.find(identity(replace(CARS, seed=1))) is None


def test_a_run_under_an_older_name_is_replaced_and_not_doubled(tmp_path):
    for name in ("0", "z"):  # whichever sorts last
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps({"format": 1, **result(CARS, measures={"lemma": 1})}))
        records = Records(folder)
        path = records.write(result(CARS, measures={"mined": 2}))
        assert [each.name for each in folder.iterdir()] == [path.name]
        assert records.find(identity(CARS)).measures == {"lemma": 1, "mined": 2}


def test_a_file_of_before_a_setting_existed_counts_as_its_default(tmp_path):
    records = Records(tmp_path)
    values = result(CARS)
    del values["config"]["loss.exclude"]
    records.write(values)
    assert records.find(identity(CARS)) is not None
    assert records.find(identity(override(CARS, {"loss.exclude": "instance"}))) is None


def test_measures_add_up(tmp_path):
    records = Records(tmp_path)
    records.write(result(CARS, measures={"lemma": 1}))
    records.write(result(CARS, measures={"mined": 2}))
    assert records.find(identity(CARS)).measures == {"lemma": 1, "mined": 2} and len(list(tmp_path.iterdir())) == 1


def test_files_of_other_processes_are_seen_after_a_refresh(tmp_path):
    one, other = Records(tmp_path), Records(tmp_path)
    other.write(result(CARS))
    assert len(one) == 0
    one.refresh()
    assert len(one) == 1


def test_a_file_that_is_being_written_is_left_alone(tmp_path):
    (tmp_path / "cars.part.json").write_text("{")
    assert len(Records(tmp_path)) == 0


def test_scores_and_curves():
    values = {"config": {}, "scores": {"a": {"recall@1": 0.4}, "b": {"recall@1": 0.6}}}
    record = Record({**values, "curves": {"step": [0, 10, 20], "drift_10": [None, 0.2, 0.1]}})
    assert record.score() == 0.4 and record.score(protocol="b") == 0.6 and record.score(protocol="c") != record.score()
    assert record.curve("drift_10") == ([10, 20], [0.2, 0.1]) and record.curve("nothing") == ([], [])
    assert Record({"config": {}, "failed": "iteration 3"}).score() == 0.0


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}', '{"format": 1}'])
def test_another_file_is_told(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json is no result"):
        Records(tmp_path)


def test_a_newer_format_is_told(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"format": record.FORMAT + 1, "config": {}}))
    with pytest.raises(InputError, match="upgrade"):
        Records(tmp_path)


def test_a_folder_that_is_not_there_is_empty():
    assert len(Records(Path("/nowhere/at/all"))) == 0


# ------------------------------------------------------------------ the classes of the test queries


@pytest.fixture
def dataset():
    labels = np.array([2, 2, 0, 1, 1, 1, 2])
    test = ImageSet("cars test", labels, ["a", "b", "c"], pixels=np.zeros((7, 4, 4), np.uint8))
    train = ImageSet("cars train", labels[:2] * 0, ["z"], pixels=np.zeros((2, 4, 4), np.uint8))
    return Dataset("cars", train, (Protocol("test", test, (1,)),))


def test_labels_come_back_in_the_order_of_the_queries(dataset, tmp_path):
    path = write_labels(tmp_path, dataset)
    assert path == labels_file(tmp_path, "cars") and json.loads(path.read_text())["protocol"] == "test"
    assert read_labels(tmp_path, "cars", 7).tolist() == [2, 2, 0, 1, 1, 1, 2]
    assert read_labels(tmp_path, "cub", 7) is None


def test_labels_of_other_images_are_refused(dataset, tmp_path):
    write_labels(tmp_path, dataset)
    with pytest.raises(InputError, match="has 7 queries, the results have 8"):
        read_labels(tmp_path, "cars", 8)


def test_labels_are_no_result(dataset, tmp_path):
    write_labels(tmp_path, dataset)
    assert len(Records(tmp_path)) == 0


def test_runs_of_equal_labels():
    assert runs_of([]) == [] and runs_of([1, 1, 0, 0, 0, 1]) == [(1, 2), (0, 3), (1, 1)]
