"""Executes one run, from its config to its result file: trains or resumes training, measures, and writes the figures. Executes
several in parallel: worker processes that each make one run after another, within a time budget.

A step of a small network leaves a GPU waiting for kernel launches, so several runs on one GPU take little longer than one.
"""

import base64
import gc
import hashlib
import multiprocessing
import os
import platform
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from paper.experiments import MEASURES, TIMINGS
from paper.experiments.drift import CROSS_ENTROPY, classify, snapshot, stages
from paper.record import NAMED, Record, Records, file_name, folder_name, identity, may_go_on
from paper.study import Plan, Task
from xbm.errors import DivergedError, InputError, unknown
from xbm_app.files import read_checkpoint, replacing
from xbm_app.report.run_folders import read_columns
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import read_run
from xbm_app.train.finish import device_name
from xbm_app.train.metrics import read_metrics
from xbm_app.train.state import RunState, pick_device

MARGIN = 1.1  # safety factor of an estimated duration
PATIENCE = 2.0  # seconds to wait for a message before the clock is checked
SILENCE = 30.0  # seconds between progress messages


# ------------------------------------------------------------------ one run


def execute(task: Task, config: Config, runs: Path, records: Records, beside: int = 1) -> Path:
    """Makes the run and its result file.

    Args:
        task: the run to make.
        config: its config with this machine's paths.
        runs: where run folders are created; interrupted runs are resumed.
        beside: number of runs that share the machine, because it affects their times.
    """
    settings = identity(task.config)
    folder = runs / folder_name(task.config)
    begun = time.monotonic()
    if task.alone:  # a timed run must not be a resumed one
        shutil.rmtree(folder, ignore_errors=True)
    resumed = (folder / "checkpoints" / "last.pt").exists()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    values: dict[str, Any] = {"config": settings}
    try:
        values |= _trained(task, config, folder)
    except DivergedError as error:
        # divergence at some learning rate is a result, and is not repeated
        values["failed"] = f"iteration {error.iteration}: the loss is not finite"
    finally:
        gc.collect()  # the next run of this process needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    path = records.write({
        **values,
        "weights": weights_of(config),
        "chosen": task.chosen,
        "split": f"{task.config.data.holdout:.0%} of the training classes, held out" if task.config.data.holdout else "test",
        "precision": precision_of(config),
        "wall_seconds": None if resumed else round(time.monotonic() - begun, 1),  # of the whole run
        "runs_beside": beside - 1,
        "versions": versions(),
        "device": device_name(pick_device(config.device)),
        "date": time.strftime("%Y-%m-%d"),
    })  # fmt: skip
    if not may_go_on(task.config) or values.get("failed"):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # hundreds of megabytes a run, and the figures are kept
    return path


def _trained(task: Task, config: Config, folder: Path) -> dict[str, Any]:
    if config.loss.name == CROSS_ENTROPY:
        return classify(config, folder)
    from xbm_app.train.loop import train

    result: dict[str, Any] = {}
    for stop in stages(config, task.measures):
        kept, last = snapshot(folder, config.optim.iterations - stop), folder / "checkpoints" / "last.pt"
        if kept.exists():
            continue
        if last.exists() and read_checkpoint(last)["step"] > stop:  # trained past this model: start again
            shutil.rmtree(folder)
        begun = (folder / "config.yaml").exists()
        result = train(override(config, {"optim.iterations": stop}), folder, resume=begun, quiet=True)
        if stop < config.optim.iterations:
            with replacing(kept) as beside:
                shutil.copy(last, beside)
    return {
        "data": result["data"],
        "iterations": result["iterations"],
        "scores": {protocol: _rounded(scores) for protocol, scores in result["protocols"].items()},
        "recall_curve": [round(value, 5) for value in result["curve"]],
        "hits": None if config.data.holdout else hits(config, folder),
        "curves": read_columns(folder),
        "seconds_per_iteration": result["seconds_per_iteration"],
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "notes": [text for _, text in result["notes"]],
        "measures": {each: measure(each, config, folder) for each in task.measures},
    }


def measure(name: str, config: Config, folder: Path) -> Any:
    """Measures something on a finished run, for its result file."""
    if name in TIMINGS:
        return TIMINGS[name](config, folder)
    if name not in MEASURES:
        raise unknown("measure", name, [*MEASURES, *TIMINGS])
    run = RunState(config, read_run(config, folder), folder)
    run.restore()
    run.model.eval()
    return MEASURES[name](run)


def hits(config: Config, folder: Path) -> dict[str, Any]:
    """Which queries of the first protocol retrieve an image of their own class first: bit k, in the order of the data set, is
    query k (most significant bit first), so that classes can be drawn with all their queries."""
    protocol = read_run(config, folder).protocols[0]
    labels = np.asarray(protocol.query.labels)
    searched = labels if protocol.gallery is None else np.asarray(protocol.gallery.labels)
    with np.load(folder / "examples.npz", allow_pickle=False) as examples:
        right = searched[examples["neighbours"][:, 0]] == labels
    packed = base64.b64encode(np.packbits(right).tobytes()).decode()
    return {"protocol": protocol.name, "queries": len(right), "rank_1": packed}


def _rounded(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in scores.items()}


def weights_of(config: Config) -> dict[str, str]:
    """The initial weights of the trunk: a file by its name and digest."""
    path = Path(config.model.weights)
    if config.model.weights in NAMED or not path.is_file():
        return {"name": path.name}
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def precision_of(config: Config) -> str:
    if config.optim.precision != "auto":
        return config.optim.precision
    return "bf16" if pick_device(config.device).type == "cuda" else "fp32"


def versions() -> dict[str, str]:
    from xbm import __version__

    return {"xbm": __version__, "python": platform.python_version(), "torch": torch.__version__}


# ------------------------------------------------------------------ several in parallel


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    another: Callable[[], "Worker"]  # starts a replacement
    task: Task | None = None
    since: float = 0.0


class Reply(NamedTuple):
    """What a worker process answers when a run has ended.

    Attributes:
        error: why the run failed, or an empty string.
        ended: whether the process has ended too.
    """

    error: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Outcome:
    """How many runs were finished, which failed and why, and how many are left."""

    finished: int
    failed: dict[str, str]
    left: int


def run_all(
    planned: Callable[[], Plan],
    place: Callable[[Config], Config],
    records: Records,
    runs: Path,
    jobs: int = 1,
    budget: float = float("inf"),
    tell: Callable[[str], None] = print,
) -> Outcome:
    """Makes every run of the plan, and the runs that become possible when these are finished.

    Args:
        planned: returns the plan for the current results; called again whenever a run has ended.
        place: inserts this machine's paths into a config.
        runs: where run folders are created.
        jobs: number of runs in parallel.
        budget: seconds. A run that would not finish in time, judging by similar runs, is not started. Runs that are unfinished
            at the end are stopped, and resume from their last checkpoint the next time.
    """
    begun = time.monotonic()
    finished, failed, seen = 0, dict[str, str](), list[Record]()
    plan, last_message = planned(), begun
    with _workers(jobs, runs, records.folder) as workers:
        while True:
            busy = [w for w in workers if w.task is not None]
            running = {w.task.key for w in busy if w.task is not None}
            ready = [task for task in plan.ready if task.key not in running and task.key not in failed]
            left = budget - (time.monotonic() - begun)
            for worker in [w for w in workers if w.task is None]:
                task = next((t for t in ready if _may_start(t, busy) and MARGIN * estimate(t, seen) <= left), None)
                if task is None:
                    break
                ready.remove(task)
                worker.task, worker.since = task, time.monotonic()
                busy.append(worker)
                worker.pipe.send((task, place(task.config), jobs))
            if not busy:
                return Outcome(finished, failed, len(ready) + plan.waiting)
            if left <= 0:
                tell(f"the budget of {budget:.0f} s is spent: {len(busy)} runs are stopped and can be resumed")
                return Outcome(finished, failed, len(ready) + len(busy) + plan.waiting)
            if time.monotonic() - last_message > SILENCE:
                last_message = time.monotonic()
                tell("running · " + " · ".join(_where(w, runs) for w in busy))
            wait([w.pipe for w in busy] + [w.process.sentinel for w in busy], timeout=max(0.0, min(PATIENCE, left)))
            for worker in busy:
                reply = _receive(worker)
                if reply is None:
                    continue
                assert worker.task is not None
                name, spent = _named(worker.task), time.monotonic() - worker.since
                if reply.error:
                    failed[worker.task.key] = f"{name}: {reply.error}"
                    tell(f"failed · {name}: {reply.error}")
                else:
                    finished += 1
                    records.refresh()
                    record = records.find(identity(worker.task.config))
                    seen += [] if record is None else [record]
                    shown = "" if record is None else _shown(record.values, record.score())
                    to_go = len(ready) + plan.waiting + len(busy) - 1
                    rest = (time.monotonic() - begun) / finished * to_go
                    tell(f"{finished} made, {to_go} to go, about {rest:.0f} s · {name}{shown} · {spent:.0f} s")
                worker.task = None
                if reply.ended:
                    workers[workers.index(worker)] = worker.another()
                plan = planned()


def _may_start(task: Task, busy: list[Worker]) -> bool:
    """A run whose time is measured must not share the machine."""
    return not busy if task.alone else not any(w.task is not None and w.task.alone for w in busy)


def estimate(task: Task, seen: Iterable[Record]) -> float:
    """Seconds that a run will take, from the slowest similar run so far; 0 if there is none."""
    settings = identity(task.config)
    similar = ("data.name", "model.trunk", "batch.size", "memory.updates_per_step")
    long = "lemma" in task.measures
    seconds = [
        record.values["wall_seconds"] * max(1.0, task.config.optim.iterations / record.values["iterations"])
        for record in seen
        if record.values.get("iterations")
        and record.values.get("wall_seconds")
        and (long or "lemma" not in record.measures)
        and all(record.config[name] == settings[name] for name in similar)
    ]
    return max(seconds, default=0.0)


def _receive(worker: Worker) -> Reply | None:
    if worker.pipe.poll():
        try:
            return worker.pipe.recv()
        except EOFError:
            pass
    if worker.process.is_alive():
        return None
    raise InputError(
        f"the process of {_named(worker.task)} ended unexpectedly (exit code {worker.process.exitcode}): "  # type: ignore[arg-type]
        "it may have run out of memory; try fewer --jobs. Finished runs are kept"
    )


def _named(task: Task) -> str:
    return file_name(identity(task.config)).removesuffix(".json")


def _where(worker: Worker, runs: Path) -> str:
    """The progress of a run, from the last line of its metrics."""
    assert worker.task is not None
    file = runs / folder_name(worker.task.config) / "metrics.csv"
    rows = read_metrics(file) if file.exists() else []
    done, total = int(rows[-1]["step"]) + 1 if rows else 0, worker.task.config.optim.iterations
    return f"{_named(worker.task)} {done}/{total}"


def _shown(values: Any, recall: float) -> str:
    if values.get("failed"):
        return f": diverged, {values['failed']}"
    return f": R@1 {100 * recall:.1f}" if values.get("scores") else ""


@contextmanager
def _workers(jobs: int, runs: Path, results: Path) -> Iterator[list[Worker]]:
    """Worker processes, which are ended when the block is left in whatever way."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // jobs))  # read by the worker processes when they load torch
    context = multiprocessing.get_context("spawn")
    workers: list[Worker] = []
    before = (
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if threading.current_thread() is threading.main_thread()
        else None
    )

    def start() -> Worker:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, os.getpid(), runs, results), daemon=True)
        process.start()
        there.close()
        return Worker(process, here, start)

    try:
        for _ in range(jobs):
            workers.append(start())
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _serve(pipe: Connection, parent: int, runs: Path, results: Path) -> None:
    """The main function of a worker process: makes the runs it receives until its parent ends."""
    threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    while True:
        try:
            task, config, jobs = pipe.recv()
        except EOFError:
            return
        reply = Reply()
        try:
            execute(task, config, runs, Records(results), jobs)
        except InputError as error:
            reply = Reply(str(error))
        except Exception as error:  # a bug in one run must not end the others; it is reported
            traceback.print_exc()
            reply = Reply(f"{type(error).__name__}: {error}", ended=True)  # the device may be unusable in this process now
        pipe.send(reply)
        if reply.ended:
            return


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
