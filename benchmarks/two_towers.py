"""Two towers over seeds, in-batch negatives only and with a memory: recall@K both ways on functions that were not trained on.

    python -m benchmarks.two_towers [--out FILE.json]

The pairs are those of examples/two_towers.py, in four quarters. Rate and number of iterations of each arm are those with the
best code@1 on a held-out quarter, after training on two others with seed 0, among the same candidates for every arm. Then every
arm is trained on all three with each seed and meets the last quarter once.
"""

import argparse
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import machine
from examples.two_towers import Pairs, new_towers, read_pairs, score, train

ARMS = {
    "in-batch, batch 32": {"size": 0},
    "memory of 1,024, batch 32": {"size": 1024},
    "memory of 4,096, batch 32": {"size": 4096},
}
RATES, LENGTHS, SEEDS = (3e-4, 1e-3), (400, 800, 1200), (0, 1, 2)


def trained(pairs: Pairs, ids: torch.Tensor, on: torch.Tensor, lengths: tuple[int, ...], **settings: Any) -> dict[int, Any]:
    """The scores after each number of iterations."""
    torch.manual_seed(settings.get("seed", 0))
    towers, found = new_towers(pairs, ids), {}
    for step, _ in train(towers, pairs, ids, **settings):
        if step in lengths:
            found[step] = score(towers, pairs, on)
        if step == lengths[-1]:
            return found
    return found


def untrained(pairs: Pairs, ids: torch.Tensor, on: torch.Tensor) -> list[dict[str, float]]:
    """The scores of the towers that each seed begins with."""
    scores = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        scores.append(score(new_towers(pairs, ids), pairs, on))
    return scores


def main(out: Path | None = None) -> None:
    pairs = read_pairs()
    fit, held, test = ((pairs.quarter[:, None] == torch.tensor(q)).any(1).nonzero()[:, 0] for q in ((0, 3), (2,), (1,)))
    everything, rows = torch.cat([fit, held]).sort().values, {}
    before = untrained(pairs, everything, test)
    for name, arm in ARMS.items():
        tried = {(r, n): s for r in RATES for n, s in trained(pairs, fit, held, LENGTHS, rate=r, **arm).items()}
        rate, length = max(tried, key=lambda k: tried[k]["code@1"])
        runs = [trained(pairs, everything, test, (length,), rate=rate, seed=seed, **arm)[length] for seed in SEEDS]
        rows[name] = {
            "rate": rate, "iterations": length, "runs": runs,
            "tried": [{"rate": r, "iterations": n, **s} for (r, n), s in tried.items()],
        }  # fmt: skip
        mean = {metric: statistics.mean(run[metric] for run in runs) for metric in runs[0]}
        print(name, rate, length, {metric: round(100 * value, 1) for metric, value in mean.items()}, flush=True)
    if out is not None:
        about = {"device": machine(), "torch": torch.__version__, "python": platform.python_version(), "seeds": SEEDS}
        about |= {"command": f"python -m {' '.join(['benchmarks.two_towers', *sys.argv[1:]])}"}
        about |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "train": len(everything), "test": len(test)}
        out.write_text(json.dumps({**about, "untrained": before, "arms": rows}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
