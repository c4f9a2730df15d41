"""What does training only the head cost, and score, on Cars? Writes benchmarks/results/cpu-frozen-trunk.json.

The features of the frozen trunk are computed once, into FEATURES. Nothing is tuned: the learning rate is ten times that of full
training, since only a linear layer is trained, and was declared before the first run.

python -m benchmarks.frozen_trunk CARS FEATURES [TRUNK WEIGHTS]    # default: efficientnet_lite0 imagenet
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from xbm_app.train.config import Config, override
from xbm_app.train.loop import train
from xbm_app.train.presets import preset

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu-frozen-trunk.json"
RATE = 1e-3
ITERATIONS = 500
SEEDS = (0, 1, 2)


def config_of(cars: str, features: str, trunk: str, weights: str) -> Config:
    """`xbm train cars --trunk TRUNK --set model.freeze=trunk`, with a shorter schedule."""
    chosen = preset("cars", trunk=trunk, recipe="auto", weights=weights)
    settings = {
        "optim.lr": RATE,
        "optim.iterations": ITERATIONS,
        "optim.decay_at": (7 * ITERATIONS // 10,),
        "model.freeze": "trunk",
    }
    return override(chosen, {"device": "cpu", "data.root": cars, "data.features": features, **settings})


def timed(config: Config) -> dict[str, Any]:
    """One run: its R@1, the seconds of its iterations, and of everything else (data, features, scores)."""
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        result = train(config, Path(folder) / "run", quiet=True)
        seconds = time.perf_counter() - start
    training = result["seconds_per_iteration"] * config.optim.iterations
    row = {"lr": config.optim.lr, "seed": config.seed, "recall@1": result["recall@1"], "map@r": result["map@r"]}
    return {**row, "training_seconds": round(training, 2), "all_seconds": round(seconds, 2)}


def untrained(config: Config) -> float:
    """R@1 of a head that has not learned."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(override(config, {"optim.iterations": 1, "optim.lr": 0.0}), run, quiet=True)
        return float(json.loads((run / "result.json").read_text())["recall@1"])


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
