"""The demo: glyphs with and without memory, a few seeds each, side by side on the cores of a laptop."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xbm.errors import InputError
from xbm_app.report.statistics import mean_and_error
from xbm_app.train.config import Config, override
from xbm_app.train.presets import preset

ITERATIONS = 1000
MARK = ".xbm_demo"  # an empty file in the folder of a demo
PICTURES = "glyphs"  # where the images to search lie, as files


@dataclass(frozen=True)
class Arm:
    """One way of training, run with several seeds."""

    name: str
    loss: str
    memory: bool
    settings: tuple[tuple[str, Any], ...] = ()
    seeds: int | None = None  # fewer than the others

    @property
    def reduction(self) -> str:
        return config_of(self, 0).reduction


# The baselines run with the reduction that was better on held-out training classes: docs/demo.md has the figures. With memory
# the recipe is `auto`; the last arm sums over the memory's pairs as the paper does.
ARMS = (
    Arm("contrastive", "contrastive", False),
    Arm("contrastive + memory", "contrastive", True),
    Arm("MS", "ms", False),
    Arm("MS + memory", "ms", True),
    Arm("contrastive, summed", "contrastive", False, (("loss.reduction", "sum"),), seeds=1),
    Arm("contrastive, summed + memory", "contrastive", True, (("loss.reduction", "sum"), ("memory.reduction", None)), seeds=1),
)


def config_of(arm: Arm, seed: int, iterations: int = ITERATIONS) -> Config:
    changes = {
        "seed": seed,
        "device": "cpu",
        "optim.iterations": iterations,
        "optim.decay_at": (round(0.8 * iterations),),
        "log.checkpoint_every": iterations,
        **dict(arm.settings),
    }
    if not arm.memory:
        changes["memory.ratio"] = 0.0
    return override(preset("glyphs", arm.loss, recipe="auto" if arm.memory else None), changes)


def run_demo(out: Path, seeds: int, iterations: int = ITERATIONS, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Trains every arm with every seed, one run a core at a time, and returns a figure sheet per run.

    Raises:
        InputError: `out` holds something other than an earlier demo, which alone is replaced.
    """
    from xbm_app.data.glyphs import read_glyphs
    from xbm_app.data.images import write_pictures

    if seeds < 1 or iterations < 1:
        raise InputError(f"{seeds} seeds of {iterations} iterations show nothing: give at least 1 of each")
    begun = time.monotonic()
    _clear(out)
    size = preset("glyphs").data.resize
    glyphs = read_glyphs(size=size)  # made once, before several processes want it
    tell(f"glyphs: {glyphs.train.num_classes} classes to train on, {glyphs.protocols[0].query.num_classes} others to search")
    write_pictures(glyphs.protocols[0].query, out / PICTURES)
    # seeds outermost: if the demo is stopped early, what is there is balanced
    work = [(arm, seed) for seed in range(seeds) for arm in ARMS if seed < (arm.seeds or seeds)]
    runs = []
    for done, run in enumerate(_side_by_side(work, out, iterations), start=1):
        runs.append(run)
        spent = time.monotonic() - begun
        left = spent / done * (len(work) - done)
        tell(
            f"{done}/{len(work)} · {run['name']}, seed {run['seed']}: R@1 {100 * run['recall@1']:.1f} · about {left:.0f} s left"
        )
    order = {arm.name: position for position, arm in enumerate(ARMS)}
    return sorted(runs, key=lambda run: (order[run["name"]], run["seed"]))


def next_steps(runs: list[dict[str, Any]], out: Path) -> list[tuple[str, ...]]:
    """The commands, word by word, that search with the best run and then set it beside the same loss without memory."""
    best = max(runs, key=lambda run: run["recall@1"])
    images = out / PICTURES
    query = min(images.rglob("*.png"), default=images / "CLASS" / "0.png")
    steps = [("index", best["folder"], str(images)), ("search", best["folder"], str(query)), ("serve", best["folder"])]
    for run in runs:
        if (run["name"], run["seed"]) == (best["name"].removesuffix(" + memory"), best["seed"]) and run is not best:
            steps += [("index", run["folder"], str(images)), ("serve", best["folder"], run["folder"])]
    return steps


def _clear(out: Path) -> None:
    """An empty folder for a demo. Only what an earlier demo left is deleted, never a folder that the user named by mistake."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not the folder of an earlier demo, which alone is replaced: give another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def _side_by_side(work: list[tuple[Arm, int]], out: Path, iterations: int) -> Iterator[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes below: one run a core beats one run on all cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cores, len(work)), mp_context=context) as pool:
        jobs = [pool.submit(_run, arm, seed, str(out), iterations) for arm, seed in work]
        try:
            for job in as_completed(jobs):
                yield job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _run(arm: Arm, seed: int, out: str, iterations: int) -> dict[str, Any]:
    import torch

    from xbm_app.train.loop import train

    torch.set_num_threads(1)
    folder = Path(out) / f"{arm.name.replace(' ', '_').replace(',', '').replace('+', 'with')}_seed{seed}"
    begun = time.perf_counter()
    result = train(config_of(arm, seed, iterations), folder, quiet=True)
    recall = {name: value for name, value in result.items() if name.startswith(("recall@", "map@r", "r_precision"))}
    return {
        "name": arm.name,
        "loss": "contrastive" if arm.loss == "contrastive" else "ms",
        "reduction": arm.reduction if arm.loss == "contrastive" else "mean",
        "memory": arm.memory,
        "seed": seed,
        **recall,
        "seconds": time.perf_counter() - begun,
        "iterations": iterations,
        "notes": result["notes"],
        "folder": str(folder),
    }


def summary(runs: list[dict[str, Any]], key: str = "recall@1") -> list[dict[str, Any]]:
    """One row an arm: mean and standard error over the seeds, and for memory arms the paired gain over the baseline."""
    rows = []
    by_arm: dict[str, dict[int, float]] = {}
    for run in runs:
        by_arm.setdefault(run["name"], {})[run["seed"]] = run[key]
    for arm in ARMS:
        scores = by_arm.get(arm.name)
        if not scores:
            continue
        mean, error = mean_and_error(list(scores.values()))
        row: dict[str, Any] = {"name": arm.name, "seeds": len(scores), "mean": mean, "error": error}
        base = by_arm.get(arm.name.removesuffix(" + memory"), {})
        paired = [scores[seed] - base[seed] for seed in scores if seed in base]
        if arm.memory and paired:
            row["gain"], row["gain_error"] = mean_and_error(paired)
        rows.append(row)
    return rows
