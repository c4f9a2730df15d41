"""One run from config to result file, on a few little pictures."""

import json

import pytest
import torch

from paper.experiments import MEASURES
from paper.record import Records, file_name, identity
from paper.study import Task
from paper.work import execute, measure, weights_of
from tests.tiny import tiny_config
from xbm.errors import DivergedError, InputError
from xbm_app.report import run_folders
from xbm_app.report.run_folders import read_columns
from xbm_app.train.config import override
from xbm_app.train.loop import train


@pytest.fixture(autouse=True)
def _few_pairs(monkeypatch):
    monkeypatch.setattr("paper.experiments.drift.PAIRS", 3)


def task_of(config, measures=(), chosen=None) -> Task:
    return Task(override(config, {"data.root": None}), chosen, measures)


def test_a_result_has_all_that_a_claim_needs_and_nothing_of_the_machine(photos, tmp_path):
    config = tiny_config(photos)
    records = Records(tmp_path / "results")
    path = execute(task_of(config, chosen={"picked": 1e-3}), config, tmp_path / "runs", records, beside=3)
    values = json.loads(path.read_text())
    assert values["scores"]["test"]["queries"] == 36 and 0 <= values["scores"]["test"]["recall@1"] <= 1
    assert values["data"]["train_classes"] == 6 and values["iterations"] == 17 and values["config"]["seed"] == 0
    assert values["split"] == "test" and values["chosen"] == {"picked": 1e-3} and values["runs_beside"] == 2
    assert values["precision"] == "fp32" and values["versions"]["torch"] == torch.__version__ and "cpu" in values["device"]
    assert values["weights"] == {"name": "none"} and len(values["date"]) == 10 and values["wall_seconds"] > 0
    assert values["curves"]["step"] == [4, 9, 14, 16] and "drift_1000" not in values["curves"]
    assert str(tmp_path) not in path.read_text() and str(photos) not in path.read_text()
    folder = next((tmp_path / "runs").iterdir())
    assert not (folder / "checkpoints").exists() and (folder / "metrics.csv").exists()


def test_everything_is_measured_on_one_run_and_the_scores_are_those_of_a_plain_one(photos, tmp_path):
    config = tiny_config(photos, memory__fill=True)
    records = Records(tmp_path / "results")
    names = ("lemma", "outliers", "mined", "retrieved")
    execute(task_of(config, names), config, tmp_path / "runs", records)
    record = records.find(identity(config))
    plain = train(config, tmp_path / "plain", quiet=True)
    assert record.score() == pytest.approx(plain["recall@1"], abs=1e-6)  # stopping on the way changed nothing
    assert set(record.measures) == set(names) and json.dumps(record.measures)
    lemma = record.measures["lemma"]
    assert set(lemma["pairs"]) == {"memory", "10"} and len(lemma["C"]) == 3
    for pairs in lemma["pairs"].values():
        assert len(pairs["error"]) == len(pairs["epsilon"]) == len(pairs["anchor"]) > 4
        assert all(e <= 1.01 * lemma["C"][a] * eps for e, a, eps in zip(pairs["error"], pairs["anchor"], pairs["epsilon"]))
    assert max(lemma["pairs"]["10"]["epsilon"]) > 0 and len(lemma["pairs"]["10"]["error"]) == 9
    assert len(record.measures["retrieved"]["queries"]) == 36 and set(record.measures["outliers"]) >= {"contrastive"}


def test_a_run_that_was_stopped_goes_on(photos, tmp_path, monkeypatch):
    config = tiny_config(photos)
    records = Records(tmp_path / "results")
    whole = execute(task_of(config, ("lemma",)), config, tmp_path / "whole", records).read_text()
    kept = json.loads(whole)
    usual = dict(MEASURES)
    monkeypatch.setattr("paper.work.MEASURES", {"lemma": stop})
    again = Records(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        execute(task_of(config, ("lemma",)), config, tmp_path / "runs", again)
    assert len(again) == 0
    monkeypatch.setattr("paper.work.MEASURES", usual)
    values = json.loads(execute(task_of(config, ("lemma",)), config, tmp_path / "runs", again).read_text())
    assert values["scores"] == kept["scores"] and values["measures"] == kept["measures"] and values["curves"] == kept["curves"]


@pytest.mark.slow
def test_models_kept_on_the_way_are_those_of_their_iterations(photos, tmp_path):
    """Also where the run had been trained further before anybody wanted them."""
    config = tiny_config(photos)
    folder = tmp_path / "runs" / file_name(identity(config)).removesuffix(".json")
    train(config, folder, quiet=True)
    wanted = execute(task_of(config, ("lemma",)), config, tmp_path / "other", Records(tmp_path / "other")).read_text()
    text = execute(task_of(config, ("lemma",)), config, tmp_path / "runs", Records(tmp_path / "results")).read_text()
    assert json.loads(text)["measures"] == json.loads(wanted)["measures"]


def test_a_run_that_went_on_does_not_tell_how_long_a_whole_one_takes(photos, tmp_path, monkeypatch):
    config = tiny_config(photos)
    monkeypatch.setattr("paper.work.MEASURES", {"lemma": stop})
    with pytest.raises(KeyboardInterrupt):
        execute(task_of(config, ("lemma",)), config, tmp_path / "runs", Records(tmp_path / "results"))
    values = json.loads(execute(task_of(config), config, tmp_path / "runs", Records(tmp_path / "results")).read_text())
    assert values["wall_seconds"] is None


def test_what_is_timed_is_never_gone_on_with(photos, tmp_path):
    config = tiny_config(photos, optim__iterations=18)
    folder = tmp_path / "runs" / file_name(identity(config)).removesuffix(".json")
    train(config, folder, quiet=True)
    values = json.loads(execute(task_of(config, ("cost",)), config, tmp_path / "runs", Records(tmp_path / "r")).read_text())
    assert values["measures"]["cost"]["seconds_per_iteration"] > 0


def test_steps_are_timed_beside_those_of_the_plain_queue(photos, tmp_path):
    config = tiny_config(photos, optim__iterations=8, memory__update="moving_average", loss__reduction="mean")
    task = task_of(config, ("beside_queue",))
    taken = json.loads(execute(task, config, tmp_path / "runs", Records(tmp_path / "r")).read_text())["measures"][
        "beside_queue"
    ]
    assert set(taken) == {"queue", "ours"} and all(len(each) == 6 and min(each) > 0 for each in taken.values())


def stop(*_):
    raise KeyboardInterrupt


def test_a_run_that_diverges_is_an_outcome(photos, tmp_path, monkeypatch):
    def diverges(*_, **__):
        raise DivergedError(7)

    monkeypatch.setattr("xbm_app.train.loop.train", diverges)
    config = tiny_config(photos)
    records = Records(tmp_path / "results")
    execute(task_of(config), config, tmp_path / "runs", records)
    record = records.find(identity(config))
    assert record.score() == 0 and record.values["failed"] == "iteration 7: the loss is not finite"


def test_other_trouble_is_no_outcome(photos, tmp_path):
    config = tiny_config(photos / "nowhere")
    with pytest.raises(InputError):
        execute(task_of(config), config, tmp_path / "runs", Records(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


def test_an_unknown_measure_is_told(photos, tmp_path):
    with pytest.raises(InputError, match="did you mean 'lemma'"):
        measure("lema", tiny_config(photos), tmp_path)


def test_weights_of_a_file_have_a_name_and_a_digest(photos, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"abc")
    config = tiny_config(photos, model__weights=str(tmp_path / "w.safetensors"))
    weights = weights_of(config)
    assert weights["name"] == "w.safetensors" and weights["sha256"].startswith("ba7816bf")
    assert weights_of(tiny_config(photos)) == {"name": "none"}


def test_curves_leave_out_what_was_never_measured(tmp_path, monkeypatch):
    nan = float("nan")
    rows = [dict.fromkeys(run_folders.COLUMNS, nan) | {"step": k, "loss": 1.23456} for k in range(2)]
    monkeypatch.setattr(run_folders, "read_metrics", lambda path: rows)
    assert read_columns(tmp_path) == {"step": [0, 1], "loss": [1.235, 1.235]}
