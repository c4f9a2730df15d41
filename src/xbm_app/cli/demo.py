"""`xbm demo`: the built-in glyphs with and without memory, a few seeds each, side by side on the cores of a laptop."""

import math
import multiprocessing
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xbm.errors import InputError
from xbm_app.cli.tables import check_json, print_rows
from xbm_app.files import write_json

if TYPE_CHECKING:
    from xbm_app.train.config import Config

ITERATIONS = 1000
MOST_SEEDS = 1000
MARK = ".xbm_demo"  # an empty file that marks the folder of a demo
PICTURES = "glyphs"  # the subfolder with the images to search


def demo(
    out: Annotated[Path, typer.Option(help="the output folder; an earlier demo in it is replaced")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="number of seeds per method")] = 3,
    iterations: Annotated[int | None, typer.Option(help="iterations per run (default: 1000)")] = None,
    json: Annotated[Path | None, typer.Option(help="also write all scores to this JSON file")] = None,
) -> None:
    """Train on the built-in glyphs with and without memory, and write a page that compares the runs.

    Example: `xbm demo` · `xbm demo --seeds 1 --json figures.json`
    """
    import webbrowser

    from rich.console import Console

    check_json(json)
    start = time.monotonic()
    console = Console()
    runs = run_demo(
        out, seeds, ITERATIONS if iterations is None else iterations, say=lambda text: console.print(text, highlight=False)
    )
    rows = []
    for row in summary(runs):
        gain = f"{100 * row['gain']:+.1f} ± {100 * row['gain_error']:.1f}" if "gain" in row else ""
        error = "" if math.isnan(row["error"]) else f"{100 * row['error']:.1f}"
        rows.append([row["name"], f"{100 * row['mean']:.1f}", error, gain.replace(" ± nan", ""), str(row["seeds"])])
    print_rows(["loss", "R@1", "± s.e.", "gain from memory", "seeds"], rows)
    if json is not None:
        write_json(json, {"runs": runs, "seconds": time.monotonic() - start})
    from xbm_app.report.run_folders import report_runs

    page = report_runs([Path(run["folder"]) for run in runs], out / "report.html", groups=[run["name"] for run in runs])
    print("Search with the best run, then compare it with the same loss without memory:")
    for words in next_steps(runs, out):
        print(f"  {_called()} {shlex.join(words)}")
    console.print(f"{time.monotonic() - start:.0f} s in total. The page:", highlight=False)
    print(page.resolve())
    if console.is_terminal and (sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY")):
        webbrowser.open(page.resolve().as_uri())


def _called() -> str:
    """The command that started this program, for copying: `make demo` does not use an `xbm` on the path."""
    if os.path.basename(sys.argv[0]) != "__main__.py":
        return "xbm"
    python = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if python.startswith('..') else python)} -m xbm"


@dataclass(frozen=True)
class Arm:
    """One way of training, run with several seeds."""

    name: str
    loss: str
    memory: bool
    settings: tuple[tuple[str, Any], ...] = ()
    seeds: int | None = None  # at most

    @property
    def reduction(self) -> str:
        return config_of(self, 0).reduction


# The baselines use the reduction that was better on held-out training classes (docs/demo.md). With memory the recipe is `auto`;
# the last arm sums over the memory's pairs as the paper does.
ARMS = (
    Arm("contrastive", "contrastive", False),
    Arm("contrastive + memory", "contrastive", True),
    Arm("MS", "ms", False),
    Arm("MS + memory", "ms", True),
    Arm("contrastive, summed", "contrastive", False, (("loss.reduction", "sum"),), seeds=1),
    Arm("contrastive, summed + memory", "contrastive", True, (("loss.reduction", "sum"), ("memory.reduction", None)), seeds=1),
)


def config_of(arm: Arm, seed: int, iterations: int = ITERATIONS) -> "Config":
    from xbm_app.train.config import override
    from xbm_app.train.presets import preset

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


def run_demo(out: Path, seeds: int, iterations: int = ITERATIONS, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Trains every arm with every seed, one run per core at a time, and returns the scores of each run.

    Raises:
        InputError: `out` contains something other than an earlier demo.
    """
    from xbm_app.data.glyphs import read_glyphs
    from xbm_app.data.images import write_pictures
    from xbm_app.train.presets import preset

    if not 1 <= seeds <= MOST_SEEDS or iterations < 1:
        raise InputError(f"--seeds must be 1 to {MOST_SEEDS} and --iterations at least 1, got {seeds} and {iterations}")
    start = time.monotonic()
    _clear(out)
    size = preset("glyphs").data.resize
    glyphs = read_glyphs(size=size)  # rendered once, before several processes need it
    say(f"glyphs: training on {glyphs.train.num_classes} classes, searching {glyphs.protocols[0].query.num_classes} others")
    write_pictures(glyphs.protocols[0].query, out / PICTURES)
    # seeds in the outer loop: a demo that is stopped early has as many runs of each kind
    work = [(arm, seed) for seed in range(seeds) for arm in ARMS if seed < (arm.seeds or seeds)]
    runs = []
    for done, run in enumerate(_side_by_side(work, out, iterations), start=1):
        runs.append(run)
        left = (time.monotonic() - start) / done * (len(work) - done)
        say(
            f"{done}/{len(work)} · {run['name']}, seed {run['seed']}: R@1 {100 * run['recall@1']:.1f} · about {left:.0f} s left"
        )
    order = {arm.name: position for position, arm in enumerate(ARMS)}
    return sorted(runs, key=lambda run: (order[run["name"]], run["seed"]))


def next_steps(runs: list[dict[str, Any]], out: Path) -> list[tuple[str, ...]]:
    """The commands, word by word, that search with the best run and compare it with the same loss without memory."""
    best = max(runs, key=lambda run: run["recall@1"])
    images = out / PICTURES
    query = min(images.rglob("*.png"), default=images / "CLASS" / "0.png")
    steps = [("index", best["folder"], str(images)), ("search", best["folder"], str(query)), ("serve", best["folder"])]
    for run in runs:
        if (run["name"], run["seed"]) == (best["name"].removesuffix(" + memory"), best["seed"]) and run is not best:
            steps += [("index", run["folder"], str(images)), ("serve", best["folder"], run["folder"])]
    return steps


def _clear(out: Path) -> None:
    """Empties the folder of an earlier demo, never a folder that the user passed by mistake."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty and not the folder of an earlier demo: use another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def _side_by_side(work: list[tuple[Arm, int]], out: Path, iterations: int) -> Iterator[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes below: one run per core is faster than one run on all cores
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
    start = time.perf_counter()
    result = train(config_of(arm, seed, iterations), folder, quiet=True)
    recall = {name: value for name, value in result.items() if name.startswith(("recall@", "map@r", "r_precision"))}
    return {
        "name": arm.name,
        "loss": arm.loss,
        "reduction": arm.reduction if arm.loss == "contrastive" else "mean",
        "memory": arm.memory,
        "seed": seed,
        **recall,
        "seconds": time.perf_counter() - start,
        "iterations": iterations,
        "notes": result["notes"],
        "folder": str(folder),
    }


def summary(runs: list[dict[str, Any]], key: str = "recall@1") -> list[dict[str, Any]]:
    """One row per arm: mean and standard error over the seeds, and for arms with memory the paired gain over the baseline."""
    from xbm_app.report.groups import mean_and_error

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
