"""One run from config to result file, on a few little pictures; and runs side by side: with threads in place of processes, and
once with real ones."""

import json
import os
import pickle
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from paper import workers
from paper.experiment import Arm, Experiment, Setting
from paper.experiments import MEASURES
from paper.record import Records, file_name, identity
from paper.study import Task, plan
from paper.workers import Outcome, Reply, Worker, estimate, execute, measure, run_all, weights_of
from tests.paper.made_up import CARS, invented
from tests.tiny import tiny_config
from xbm.errors import DivergedError, InputError
from xbm_app.report import run_folders
from xbm_app.report.run_folders import read_columns
from xbm_app.train.config import override
from xbm_app.train.loop import train

# ------------------------------------------------------------------ one run


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
    monkeypatch.setattr("paper.workers.MEASURES", {"lemma": stop})
    again = Records(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        execute(task_of(config, ("lemma",)), config, tmp_path / "runs", again)
    assert len(again) == 0
    monkeypatch.setattr("paper.workers.MEASURES", usual)
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
    monkeypatch.setattr("paper.workers.MEASURES", {"lemma": stop})
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


# ------------------------------------------------------------------ several in parallel


class Alive:
    """What is asked of a process."""

    def __init__(self) -> None:
        self.sentinel, self._other = os.pipe()
        self.exitcode = None

    def is_alive(self) -> bool:
        return self.exitcode is None


class Crew:
    """Threads that invent results; `trouble` says what goes wrong with a task."""

    def __init__(self, results: Path) -> None:
        self.results, self.seconds, self.trouble = results, 0.0, lambda task: ""
        self.running: list[Task] = []
        self.most, self.together, self.started = 0, [], 0
        self.lock = threading.Lock()

    def serve(self, pipe) -> None:
        with suppress(EOFError, OSError):
            while True:
                task, _, _ = pipe.recv()
                with self.lock:
                    self.running.append(task)
                    self.most = max(self.most, len(self.running))
                    self.together.append([bool(other.measures) for other in self.running])
                time.sleep(self.seconds)
                error = self.trouble(task)
                with self.lock:
                    self.running.remove(task)
                    if not error:
                        Records(self.results).write(invented(task))
                pipe.send(Reply(error, ended=bool(error)))
                if error:
                    return

    def another(self) -> Worker:
        here, there = Pipe()
        threading.Thread(target=self.serve, args=(there,), daemon=True).start()
        self.started += 1
        return Worker(Alive(), here, self.another)

    @contextmanager
    def workers(self, jobs, runs, results):
        started = [self.another() for _ in range(jobs)]
        yield started
        for worker in started:
            worker.pipe.close()


def experiment(count: int, choose=None, measures=()) -> Experiment:
    """With so many arms, of which the middle one is measured."""
    arms = [
        Arm(f"{k}", {"batch.size": 4 * (k + 1)}, choose, measures=measures if k == count // 2 else ()) for k in range(count)
    ]
    return Experiment("x", "", "", ("cars",), lambda setting: arms, lambda data, studies: [])


@pytest.fixture
def crew(tmp_path, monkeypatch):
    threads = Crew(tmp_path / "results")
    monkeypatch.setattr(workers, "_workers", threads.workers)
    return threads


def go(crew, each, jobs=1, seeds=1, **more) -> tuple[Outcome, Records, list[str]]:
    records, messages = Records(crew.results), []
    planned = lambda: plan([each], [CARS], seeds, records)  # noqa: E731
    outcome = run_all(planned, lambda c: c, records, crew.results.parent / "runs", jobs, tell=messages.append, **more)
    return outcome, records, messages


def test_all_runs_are_made_choosing_before_scoring(crew):
    outcome, records, messages = go(crew, experiment(2, choose={}), seeds=2)
    assert outcome == Outcome(3 * 2 + 2 * 2, {}, 0) and len(records) == 10
    assert "held-out" in messages[0] and "held-out" not in messages[-1]
    assert messages[-1].startswith("10 made, 0 to go, about 0 s")
    assert go(crew, experiment(2, choose={}), seeds=2)[0].finished == 0  # all there: nothing is made again


def test_so_many_at_a_time_and_no_more(crew):
    crew.seconds = 0.05
    assert go(crew, experiment(7), jobs=3)[0].finished == 7
    assert crew.most == 3


def test_a_run_that_is_timed_has_the_machine_for_itself(crew):
    crew.seconds = 0.02
    assert go(crew, experiment(5, measures=("cost",)), jobs=3)[0].finished == 5
    assert all(len(together) == 1 for together in crew.together if any(together)) and crew.most > 1


def test_one_runs_trouble_is_told_and_the_others_go_on(crew):
    crew.trouble = lambda task: "out of luck" if task.config.batch.size == 8 else ""
    outcome, records, messages = go(crew, experiment(3))
    assert outcome.finished == 2 and outcome.left == 0 and len(records) == 2
    assert next(iter(outcome.failed.values())).endswith("out of luck") and any("failed" in line for line in messages)
    assert crew.started == 2  # the process that met it is not asked again


def test_two_processes_never_make_the_same_run(crew):
    """A run that a learning rate is chosen by, and that another experiment measures something on."""
    held_out = Arm("held out", {"optim.lr": 1e-4, "data.holdout": 0.2}, choose=None, measures=("shares",))
    both = Experiment("x", "", "", ("cars",), lambda setting: [Arm("chosen", {}), held_out], lambda data, studies: [])
    crew.seconds = 0.05
    outcome, records, _ = go(crew, both, jobs=4)
    assert outcome.finished == len(records) == 3 + 1
    shared = [record for record in records if record.config["optim.lr"] == 1e-4 and record.config["data.holdout"]]
    assert [list(record.measures) for record in shared] == [["shares"]]


def test_a_run_that_would_not_end_in_time_is_not_begun(crew):
    """The first is begun, as nothing is known; it is said to take 40 s, which do not fit any more."""
    each = experiment(2)
    same = Experiment("y", "", "", ("cars",), lambda s: [Arm(f"{k}", {"optim.lr": k}, None) for k in (1, 2)], each.draw)
    outcome, records, _ = go(crew, same, budget=30)
    assert outcome.finished == 1 and outcome.left == 1 and len(records) == 1
    assert go(crew, same, budget=300)[0] == Outcome(1, {}, 0)


def test_a_long_silence_is_broken_by_how_far_the_runs_are(crew, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE", 0.01)
    monkeypatch.setattr(workers, "PATIENCE", 0.02)
    crew.seconds = 0.5
    message = go(crew, experiment(1))[2][0]
    assert message.startswith("running · cars_efficientnet_lite0_contrastive_queue_seed0_") and message.endswith(" 0/2000")


def test_when_time_is_up_what_runs_is_stopped(crew, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.01)
    crew.seconds = 90
    begun = time.monotonic()
    outcome, _, messages = go(crew, experiment(2), budget=0.1)
    assert time.monotonic() - begun < 30 and outcome.finished == 0 and outcome.left == 2 and "can be resumed" in messages[-1]


def test_a_process_that_dies_is_told(crew):
    crew.trouble = lambda task: (_ for _ in ()).throw(EOFError)  # the thread ends, its pipe with it
    crew.workers = dying(crew.workers)
    workers._workers = crew.workers
    with pytest.raises(InputError, match="exit code -9"):
        go(crew, experiment(1))


def dying(usual):
    @contextmanager
    def killed(*arguments):
        with usual(*arguments) as crew:
            for worker in crew:
                worker.process.exitcode = -9
                os.close(worker.process._other)  # what waits for the process wakes up
            yield crew

    return killed


def test_estimates_are_the_slowest_like_run_scaled_to_the_length(tmp_path):
    records = Records(tmp_path)
    (task,) = plan([experiment(1)], [CARS], 1, records).ready
    assert estimate(task, records) == 0
    for seed, seconds in ((0, 20.0), (1, 30.0)):
        values = invented(Task(Task(task.config).config))
        records.write({**values, "config": {**values["config"], "seed": seed}, "wall_seconds": seconds})
    assert estimate(task, records) == 30
    from xbm_app.train.config import override

    assert estimate(Task(override(task.config, {"optim.iterations": 4000})), records) == 60
    assert estimate(Task(override(task.config, {"batch.size": 256})), records) == 0


def test_a_task_travels():
    task = Task(plan([experiment(1)], [CARS], 1, Records(Path("/nowhere"))).ready[0].config, {"picked": 1}, ("lemma",))
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.slow
def test_real_processes_and_their_results(tmp_path):
    glyphs = Setting("glyphs", "small", "none", mini=True)
    each = Experiment("x", "", "", ("glyphs",), lambda s: [Arm("a", {"memory.ratio": 0.0}, None)], lambda data, studies: [])
    records = Records(tmp_path / "results")
    outcome = run_all(lambda: plan([each], [glyphs], 2, records), lambda c: c, records, tmp_path / "runs", jobs=2)
    assert outcome == Outcome(2, {}, 0) and {record.seed for record in records} == {0, 1}
    for record in records:
        assert 0 < record.score() < 1 and record.values["runs_beside"] == 1 and record.values["precision"]
        assert identity(plan([each], [glyphs], 1, Records(tmp_path / "none")).ready[0].config).keys() == record.config.keys()
