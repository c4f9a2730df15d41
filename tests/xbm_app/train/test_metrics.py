import math
import sys

import pytest

from xbm.errors import InputError
from xbm_app.train.config import Config, override
from xbm_app.train.metrics import COLUMNS, Metrics, read_metrics

ROW = {"step": 4.0, "loss": 0.1 + 0.2, "lr": 1e-5, "valid_negatives_batch": 31.0, "memory_loss": math.nan, "drift_10": 1 / 3}


def row(step: int) -> dict[str, float]:
    return {**ROW, "step": float(step), "loss": 1 / (step + 3)}


def write(folder, steps, start=0):
    folder.mkdir(exist_ok=True)
    with Metrics(folder, start, Config()) as metrics:
        for step in steps:
            metrics.write(row(step))


def test_numbers_come_back_bit_for_bit_and_gaps_as_nan(tmp_path):
    write(tmp_path, [4])
    (read,) = read_metrics(tmp_path / "metrics.csv")
    assert read.keys() == set(COLUMNS)
    assert read["loss"] == 1 / 7 and read["drift_10"] == 1 / 3 and read["lr"] == 1e-5
    assert math.isnan(read["memory_loss"]) and math.isnan(read["recall@1"])
    text = (tmp_path / "metrics.csv").read_text().splitlines()
    assert text[0].split(",") == list(COLUMNS) and text[1].startswith("4,") and ",31," in text[1]


def test_opening_at_a_step_cuts_off_what_came_from_there_on(tmp_path):
    write(tmp_path / "whole", [4, 9, 14, 19])
    write(tmp_path / "cut", [4, 9, 14])
    write(tmp_path / "cut", [14, 19], start=14)  # the iteration 14 had not been part of the checkpoint
    assert (tmp_path / "cut" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    write(tmp_path, [4, 9])
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-20])
    assert [each["step"] for each in read_metrics(path)] == [4]
    path.write_text(path.read_text() + "\n14,x" + "," * (len(COLUMNS) - 2) + "\n")
    assert [each["step"] for each in read_metrics(path)] == [4]


def test_every_line_is_in_the_file_at_once(tmp_path):
    with Metrics(tmp_path, 0, Config()) as metrics:
        metrics.write(row(4))
        assert len(read_metrics(tmp_path / "metrics.csv")) == 1


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path, 0, Config()) as metrics:
        metrics.write(row(4), speed=12.5)
        metrics.write(row(9))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == [4, 9]
    assert [each.value for each in events.Scalars("loss")] == pytest.approx([1 / 7, 1 / 12])
    assert events.Scalars("iterations_per_second")[0].value == 12.5
    assert "memory_loss" not in events.Tags()["scalars"]


def test_weights_and_biases_is_only_needed_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(InputError, match="pip install wandb"):
        Metrics(tmp_path, 0, override(Config(), {"log.wandb": True}))


def test_the_first_error_is_the_one_that_is_told(tmp_path):
    class Full:
        def close(self):
            raise OSError(28, "No space left on device")

    def run() -> None:
        with Metrics(tmp_path, 0, Config()) as metrics:
            metrics._file.close()
            metrics._file = Full()
            raise KeyError("the reason")

    with pytest.raises(KeyError):
        run()
