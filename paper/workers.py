"""Executes runs in parallel: worker processes that each make one run after another, within a time budget.

A step of a small network leaves a GPU waiting for kernel launches, so several runs on one GPU take little longer than one.
"""

import multiprocessing
import os
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

from paper.record import Record, Records, file_name, folder_name, identity
from paper.study import Plan, Task
from xbm.errors import InputError
from xbm_app.train.config import Config
from xbm_app.train.metrics import read_metrics

MARGIN = 1.1  # safety factor of an estimated duration
PATIENCE = 2.0  # seconds to wait for a message before the clock is checked
SILENCE = 30.0  # seconds between progress messages


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
    from paper.work import execute

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
