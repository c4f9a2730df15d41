import math

import pytest
import torch
from torch.nn.functional import normalize

from xbm_app.train.config import Config
from xbm_app.train.metrics import COLUMNS, Metrics, RunWatcher, cosine_and_rank, read_metrics

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
    (tmp_path / "checksums.json").unlink()  # it has that of the whole file
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


def test_spread_of_known_batches():
    cosine, rank = cosine_and_rank(torch.eye(5, 7))
    assert cosine == 0 and rank == pytest.approx(5)
    cosine, rank = cosine_and_rank(torch.eye(7)[[2, 2, 2]])
    assert cosine == pytest.approx(1) and rank == pytest.approx(1, abs=1e-3)
    cosine, rank = cosine_and_rank(torch.eye(7)[[0, 0, 1, 1]])  # two directions, in equal parts
    assert cosine == pytest.approx(1 / 3) and rank == pytest.approx(2, abs=1e-3)


def test_spread_is_taken_without_a_gradient():
    anchors = normalize(torch.randn(5, 3)).requires_grad_()
    assert not any(value.requires_grad for value in cosine_and_rank(anchors))


def test_a_collapse_is_said_once():
    watcher = RunWatcher(memory_start=100, remedies=("memory.reduction=balanced",), smaller=("a smaller memory.ratio",))
    assert watcher.check({"step": 9, "mean_cosine": 0.5, "effective_rank": 20.0}) == []
    (said,) = watcher.check({"step": 19, "mean_cosine": 0.995, "effective_rank": 20.0})
    assert "iteration 19: the embeddings are collapsing (mean cosine 0.995" in said
    assert said.endswith(": try memory.reduction=balanced, a lower optim.lr, or a smaller memory.ratio")
    assert watcher.check({"step": 29, "mean_cosine": 0.999, "effective_rank": 1.0}) == []
    assert watcher.notes == [("warning", said)]


def test_only_what_the_run_lacks_and_can_have_is_advised():
    (said,) = RunWatcher(memory_start=100).check({"step": 19, "mean_cosine": 0.995})
    assert said.endswith(": try a lower optim.lr")
    (said,) = RunWatcher(0, age=20).check(line(drift_10=1.5))
    assert said.endswith("cannot help until the drift slows down; try a lower optim.lr or a later memory.start")
    (said,) = RunWatcher(0, larger=("a larger memory.ratio",)).check(line(valid_positives_memory=0.0))
    assert said.endswith(": try a larger memory.ratio or leaving out classes with a single image")


def test_a_low_rank_is_a_collapse_too():
    assert "effective rank 1.5" in RunWatcher(0).check({"step": 3, "mean_cosine": 0.1, "effective_rank": 1.5})[0]


def test_a_fall_since_the_memory_started_is_said_once():
    watcher = RunWatcher(memory_start=100)
    assert watcher.check({"step": 49, "recall@1": 0.60}) == []
    assert watcher.check({"step": 99, "recall@1": 0.55}) == []  # without memory: nothing to blame it for
    assert watcher.check({"step": 149, "recall@1": 0.54}) == []  # within what chance does
    (said,) = watcher.check({"step": 199, "recall@1": 0.40})
    assert "iteration 199: R@1 fell from 55.0 to 40.0 since the memory started" in said and "memory.start" in said
    assert watcher.check({"step": 249, "recall@1": 0.30}) == []


def test_nothing_is_said_without_figures():
    watcher = RunWatcher(memory_start=0)
    assert watcher.check({"step": 1, "mean_cosine": math.nan, "recall@1": math.nan}) == []
    assert watcher.check({"step": 2, "recall@1": 0.0}) == []  # no score from before to compare with


def test_what_was_said_and_seen_is_kept_through_a_resume():
    watcher, other = RunWatcher(memory_start=10), RunWatcher(memory_start=10)
    watcher.check({"step": 5, "recall@1": 0.9, "mean_cosine": 1.0})
    other.load_state_dict(watcher.state_dict())
    assert other.notes == watcher.notes and other.check({"step": 6, "mean_cosine": 1.0}) == []
    assert len(other.check({"step": 20, "recall@1": 0.1})) == 1


def line(**values):
    return {"step": 49, "valid_negatives_memory": 400.0, "valid_positives_memory": 100.0, **values}


def test_a_sum_whose_negatives_outweigh_its_positives_is_said_once_and_with_the_way_out():
    watcher = RunWatcher(0, summed=True)
    assert watcher.check(line(valid_negatives_memory=290.0)) == []
    (said,) = watcher.check(line())
    assert "iteration 49: the memory's negatives outweigh its positives 4 to 1" in said and "memory.reduction=balanced" in said
    assert watcher.check(line()) == []
    assert RunWatcher(0, summed=False).check(line()) == []  # balanced: however many there are


def test_a_memory_that_cannot_help_says_why():
    (said,) = RunWatcher(0, summed=True).check(line(valid_positives_memory=0.0))
    assert "held no positive for any anchor" in said
    (said,) = RunWatcher(0).check(line(valid_negatives_memory=0.0))
    assert "no negative in the memory is similar enough" in said
    (said,) = RunWatcher(0, negatives=False).check(line(valid_negatives_memory=0.0))
    assert "there is only one training class" in said
    (said,) = RunWatcher(0, positives=False).check(line(valid_negatives_memory=0.0, valid_positives_memory=0.0))
    assert "no training class has two images" in said
    assert RunWatcher(0).check(line(valid_negatives_memory=math.nan, valid_positives_memory=math.nan)) == []  # not on yet


def test_rows_that_are_lost_to_drift_are_named_with_their_age():
    assert RunWatcher(0, age=99).check(line(drift_100=1.5)) == []  # rows are younger than that
    assert RunWatcher(0, age=150).check(line(drift_100=0.9, drift_1000=1.5)) == []
    (said,) = RunWatcher(0, age=150).check(line(drift_10=0.2, drift_100=1.5))
    assert "within 100 steps an embedding moves by 1.50" in said and "150 steps old on average" in said and "optim.lr" in said
