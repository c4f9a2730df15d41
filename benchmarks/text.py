"""Compares four sources of negatives for a sentence encoder: examples/text_memory.py on CLINC150, over seeds.

    python -m benchmarks.minilm clinc150.json clinc150-minilm.pt
    python -m benchmarks.text clinc150-minilm.pt --out benchmarks/results/text.json
    python -m benchmarks.text_page

The intents are split in the order of the alphabet: the first half trains, the second half tests. Learning rate, one setting of
each arm and the length of training are chosen on the first third of the training intents, after training on the others.
Every arm has the same trials of the same number of iterations. Then each arm trains on the whole first half, with
several seeds, and is scored once on the test intents.
"""

import argparse
import copy
import json
import os
import platform
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.minilm import Prepared
from examples.text_memory import ARMS, Arm, score, train

RATES = (1e-5, 3e-5, 1e-4, 3e-4)
# What is chosen beside the learning rate: one setting of each arm, with as many values for each. The first round of trials
# takes the first values; it counts alone if there is no time for the second.
SETTINGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "batch_32": ("per_intent", (4, 2)),
    "batch_256": ("per_intent", (4, 2)),
    "queue": ("rows", (2048, 4096)),
    "moving_average": ("momentum", (0.5, 0.9)),
}
CHECKPOINTS = (25, 50, 75, 100, 150, 200, 300)
CRITERION = "map@r"
SLOWEST_FIRST = ("batch_256", "moving_average", "queue", "batch_32")


@dataclass(frozen=True)
class Job:
    """One training: a trial, scored on held-out intents at every checkpoint, or a run, scored once on the test intents."""

    name: str  # of the arm
    arm: Arm
    rate: float
    seed: int
    round: int  # of the trials; runs have one round per seed
    test: bool
    checkpoints: tuple[int, ...]
    deadline: float  # on the clock of time.time()


@dataclass(frozen=True)
class Data:
    """Intents 0 ≤ k < held are held out for choosing, held ≤ k < half train in trials, half ≤ k < end test."""

    held: int
    half: int
    end: int


def split(intents: int) -> Data:
    half = intents // 2
    return Data(half // 3, half, intents)


# ------------------------------------------------------------------ in a worker

prepared: Prepared
intents: Data


def load(path: Path, device: str, limit: int | None) -> None:
    global prepared, intents
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    torch.set_num_threads(1)
    prepared = Prepared(path, device)
    intents = split(min(limit or 10**9, int(prepared.labels.max()) + 1))


def work(job: Job) -> dict[str, Any] | None:
    """Trains and scores; None if the time is over."""
    if time.time() > job.deadline:
        return None
    labels, trained = prepared.labels, prepared.trained
    first = 0 if job.test else intents.held
    fit = ((labels >= first) & (labels < intents.half) & trained).nonzero()[:, 0]
    scored = (labels >= intents.half) & (labels < intents.end) if job.test else labels < intents.held
    ids = scored.nonzero()[:, 0]
    encode, losses, scores = copy.deepcopy(prepared.encoder), [], {}
    seconds, started = 0.0, time.perf_counter()
    for step, loss in train(encode, prepared.features, labels, fit, job.arm, job.rate, job.seed):
        losses.append(loss)
        if step in job.checkpoints:
            losses = [torch.stack(losses).mean()]  # waits for the device
            value = losses.pop().item()
            seconds += time.perf_counter() - started
            scores[step] = {**score(encode, prepared.features, labels, ids), "loss": value}
            started = time.perf_counter()
        if step == job.checkpoints[-1]:
            break
        if step % 20 == 0 and time.time() > job.deadline:
            return None
    about = {"arm": job.name, "settings": asdict(job.arm), "rate": job.rate, "seed": job.seed, "round": job.round}
    return {**about, "seconds": seconds, "scores": scores}


def untouched() -> dict[str, dict[str, float]]:
    labels = prepared.labels
    parts = {"held out": labels < intents.held, "test": (labels >= intents.half) & (labels < intents.end)}
    encode = copy.deepcopy(prepared.encoder)
    return {name: score(encode, prepared.features, labels, part.nonzero()[:, 0]) for name, part in parts.items()}


# ------------------------------------------------------------------ in the main process


def complete(results: list[dict[str, Any]], jobs: list[Job]) -> list[dict[str, Any]]:
    """The results of the rounds in which every job was done, so that all arms have equally many."""
    expected = {number: sum(job.round == number for job in jobs) for number in {job.round for job in jobs}}
    done = {number for number, count in expected.items() if sum(r["round"] == number for r in results) == count}
    return sorted(
        (result for result in results if result["round"] in done),
        key=lambda r: (r["round"], list(ARMS).index(r["arm"]), r["rate"]),
    )


def choose(trials: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By arm: the trial and the checkpoint with the best score on the held-out intents."""
    chosen: dict[str, dict[str, Any]] = {}
    for trial in trials:
        for step, scores in trial["scores"].items():
            best = chosen.get(trial["arm"])
            if best is None or scores[CRITERION] > best["held_out"][CRITERION]:
                chosen[trial["arm"]] = {
                    "settings": trial["settings"], "rate": trial["rate"], "iterations": step, "held_out": scores,
                }  # fmt: skip
    return {name: chosen[name] for name in ARMS}


def run(pool: ProcessPoolExecutor, jobs: list[Job], write: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    futures: list[Future] = [pool.submit(work, job) for job in jobs]
    for future in as_completed(futures):
        if (result := future.result()) is not None:
            results.append(result)
            write(complete(results, jobs))
            last = result["scores"][max(result["scores"])]
            said = " ".join(f"{name} {value:.4f}" for name, value in last.items())
            print(f"{result['arm']:15} rate {result['rate']:g} seed {result['seed']} round {result['round']}: {said},"
                  f" {result['seconds']:.1f} s", flush=True)  # fmt: skip
    return complete(results, jobs)


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="what benchmarks.minilm wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this time; 60 %% of it for the trials")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=CHECKPOINTS[-1])
    parser.add_argument("--intents", type=int, help="use only the first so many, for a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    checkpoints = (*(step for step in CHECKPOINTS if step < options.iterations), options.iterations)
    about: dict[str, Any] = {
        "command": "python -m benchmarks.text clinc150-minilm.pt --out benchmarks/results/text.json",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "commit": os.environ.get("XBM_COMMIT", ""),
        "workers": options.workers, "rates": RATES, "checkpoints": checkpoints, "criterion": CRITERION,
    }  # fmt: skip

    def write(**parts: Any) -> None:
        about.update(parts, seconds=round(time.time() - began, 1))
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(about, indent=1))
        partial.replace(options.out)

    trials = [
        Job(name, replace(ARMS[name], **{setting: values[number]}), rate, 0, number, False, checkpoints,
            began + 0.6 * options.seconds)
        for number in range(2) for name in SLOWEST_FIRST for rate in RATES for setting, values in [SETTINGS[name]]
    ]  # fmt: skip
    arguments = (options.prepared, options.device, options.intents)
    with ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=load, initargs=arguments) as pool:
        write(untouched=pool.submit(untouched).result())
        done = run(pool, trials, lambda results: write(trials=results))
        if not done:
            raise SystemExit(f"{options.seconds:g} s do not suffice for a round of trials")
        chosen = choose(done)
        write(trials=done, chosen=chosen)
        runs = [
            Job(name, Arm(**chosen[name]["settings"]), chosen[name]["rate"], 1 + seed, 1 + seed, True,
                (chosen[name]["iterations"],), began + options.seconds)
            for seed in range(options.seeds) for name in SLOWEST_FIRST
        ]  # fmt: skip
        write(runs=run(pool, runs, lambda results: write(runs=results)))


if __name__ == "__main__":
    main()
