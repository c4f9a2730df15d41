"""Trackers: the same figures arrive in each, a resumed run continues its own, and each is needed only when asked for."""

import math

import pytest

from xbm.errors import InputError
from xbm_app.train.config import Config, Log, override
from xbm_app.train.metrics import TRACKERS, Metrics, open_trackers

ROWS = [{"step": 4.0, "loss": 0.25, "recall@1": 0.5, "drift_10": math.nan}, {"step": 9.0, "loss": 0.125}]


def write(folder, *trackers, rows=ROWS, start=0):
    folder.mkdir(exist_ok=True)
    config = Config(log=Log(trackers=trackers, project="birds"))
    with Metrics(folder, start, config) as metrics:
        for row in rows:
            metrics.write(row, speed=8.0)
        metrics.finish(10, {"recall@1": 0.75})


def test_without_trackers_there_is_only_the_csv(tmp_path):
    write(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "metrics.csv", "checksums.json"}


@pytest.mark.slow  # importing mlflow takes seconds
def test_mlflow_gets_the_figures_and_a_resumed_run_continues(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    write(tmp_path / "run", "mlflow", rows=ROWS[:1])
    write(tmp_path / "run", "mlflow", rows=ROWS[1:], start=9)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["model.trunk"] == "googlenet"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "recall_at_1", "test/recall_at_1")}
    assert [(each.step, each.value) for each in history["loss"]] == [(4, 0.25), (9, 0.125)]
    assert [each.value for each in history["recall_at_1"]] == [0.5] and history["test/recall_at_1"][-1].value == 0.75
    assert "drift_10" not in run.data.metrics


def test_a_run_that_fails_is_failed_there_too(tmp_path, monkeypatch):
    closed = []

    class Recorder:
        def __init__(self, config, folder, step):
            pass

        def close(self, failed):
            closed.append(failed)

    monkeypatch.setitem(TRACKERS, "tensorboard", Recorder)

    def fail():
        with Metrics(tmp_path, 0, Config()):
            raise KeyError("the reason")

    with pytest.raises(KeyError):
        fail()
    with Metrics(tmp_path, 0, Config()):
        pass
    assert closed == [True, False]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_is_only_needed_when_asked_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda package: None if package == name else package)
    open_trackers(Config(log=Log(trackers=())), tmp_path, 0)
    with pytest.raises(InputError, match=rf"pip install 'xbm\[{name}\]'"):
        open_trackers(Config(log=Log(trackers=(name,))), tmp_path, 0)


def test_an_unknown_tracker_names_the_nearest(tmp_path):
    with pytest.raises(InputError, match=r"unknown tracker 'mlfow': did you mean 'mlflow'\?"):
        open_trackers(Config(log=Log(trackers=("mlfow",))), tmp_path, 0)


def test_the_former_option_still_works_and_says_its_new_name(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda config, folder, step: opened.append(config.log.project))
    with pytest.warns(UserWarning, match="log.wandb=true is now log.trackers=tensorboard,wandb"):
        open_trackers(override(Config(), {"log.wandb": "true", "log.trackers": ""}), tmp_path, 0)
    assert opened == ["xbm"]


@pytest.mark.slow
def test_weights_and_biases_writes_offline(tmp_path, monkeypatch):
    """It starts a service of its own, which takes seconds."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path / "run", "wandb")
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-run.wandb")
    content = stored.read_bytes()
    assert wandb.run is None
    assert all(text in content for text in (b"birds", b"googlenet", b"test/recall@1", b"0.125", b"0.75"))
