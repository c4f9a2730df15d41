"""What does training only the head cost, and score, on Cars? Writes benchmarks/results/cpu-frozen-trunk.json.

The features of the frozen trunk are computed once, into FEATURES. Rate and reduction are those of `auto` for a frozen
trunk, chosen on held-out training classes.

python -m benchmarks.frozen_trunk CARS FEATURES [TRUNK WEIGHTS]    # default: efficientnet_lite0 imagenet

docs/trunks.md has the figures, beside those of full training from paper/results.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from xbm_app.train.config import Config, override
from xbm_app.train.loop import train
from xbm_app.train.presets import FROZEN, preset

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu-frozen-trunk.json"
FULL = Path(__file__).resolve().parents[1] / "paper" / "results"
ITERATIONS = 500
SEEDS = (0, 1, 2)


def config_of(cars: str, features: str, trunk: str, weights: str) -> Config:
    """`xbm train cars --trunk TRUNK --set model.freeze=trunk`, with a shorter schedule."""
    chosen = preset("cars", trunk=trunk, recipe="auto", weights=weights)
    settings = {
        **FROZEN,
        "optim.iterations": ITERATIONS,
        "optim.decay_at": (7 * ITERATIONS // 10,),
        "model.freeze": "trunk",
    }
    return override(chosen, {"device": "cpu", "data.root": cars, "data.features": features, **settings})


def timed(config: Config) -> dict[str, Any]:
    """One run: its R@1, the seconds of its iterations, and of everything else (data, features, scores)."""
    with TemporaryDirectory() as folder:
        start, cpu = time.perf_counter(), time.process_time()
        result = train(config, Path(folder) / "run", quiet=True)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    training = result["seconds_per_iteration"] * config.optim.iterations
    row = {"lr": config.optim.lr, "seed": config.seed, "recall@1": result["recall@1"], "map@r": result["map@r"]}
    times = {"training_seconds": training, "all_seconds": seconds, "all_cpu_seconds": cpu}
    return {**row, **{name: round(value, 2) for name, value in times.items()}}


def untrained(config: Config) -> float:
    """R@1 of a head that has not learned."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(override(config, {"optim.iterations": 1, "optim.lr": 0.0}), run, quiet=True)
        return float(json.loads((run / "result.json").read_text())["recall@1"])


def full_training() -> list[float]:
    """R@1 of the runs of `auto` that train the whole trunk, as the experiments recorded them: one per seed."""
    wanted = {
        "data.name": "cars", "data.noise": 0.0, "data.holdout": 0.0, "loss.name": "contrastive", "memory.doubt": "skip",
        "memory.fill": True, "optim.iterations": 2_000, "optim.lr": 1e-4,
    }  # fmt: skip
    runs = [json.loads(path.read_text()) for path in FULL.glob("cars_efficientnet_lite0_contrastive_moving-average_*.json")]
    return [run["scores"]["test"]["recall@1"] for run in runs if wanted.items() <= run["config"].items()]


def section() -> str:
    """What docs/trunks.md says about it."""
    found, full = json.loads(RESULTS.read_text()), full_training()
    recalls, runs = [run["recall@1"] for run in found["runs"]], found["runs"]
    slowest, cpu = max(run["training_seconds"] for run in runs), max(run["all_cpu_seconds"] for run in runs)
    return (
        "## What does training only the head cost?\n\n"
        f"Cars-196, EfficientNet-Lite0, {found['iterations']} iterations on cached features, on {found['threads']} CPU "
        f"thread{'s' if found['threads'] > 1 else ''}: at most {slowest:.1f} s for the iterations, "
        f"{max(run['all_seconds'] for run in runs):.1f} s with reading, "
        f"scoring and writing ({cpu:.1f} s of CPU time). R@1 in percent, means of {len(runs)} "
        f"seeds:\n\n| | R@1 |\n|---|---|\n| head not trained | {100 * found['untrained']:.1f} |\n"
        f"| head only, `auto` with `model.freeze=trunk` | {100 * mean(recalls):.1f} |\n"
        f"| whole trunk, `auto`, 2,000 iterations | {100 * mean(full):.1f} |\n\n"
        "`python -m benchmarks.frozen_trunk` measures this. Computing the features takes one pass of the trunk over all "
        f"images. For a frozen trunk, `auto` sets `memory.reduction=balanced` and `optim.lr={FROZEN['optim.lr']}`, unless you "
        "do: chosen on held-out training classes of Cars, with one seed. With summed pairs at that rate, the trained head "
        "scored less there than the untrained one.\n\n"
    )


def main() -> None:
    cars, features, trunk, weights = (*sys.argv[1:], *("", "", "efficientnet_lite0", "imagenet")[len(sys.argv) - 1 :])[:4]
    if not features:
        sys.exit("usage: python -m benchmarks.frozen_trunk CARS FEATURES [TRUNK WEIGHTS]")
    base = config_of(cars, features, trunk, weights)
    start = time.perf_counter()
    before = untrained(base)
    print(f"features: {time.perf_counter() - start:.0f} s, R@1 with a random head {before}", flush=True)
    runs = [timed(replace(base, seed=seed)) for seed in SEEDS]
    print(*runs, sep="\n", flush=True)
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    rows = {
        "trunk": trunk,
        "weights": Path(weights).name,
        "iterations": ITERATIONS,
        "untrained": before,
        "runs": runs,
        **versions,
    }
    RESULTS.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
