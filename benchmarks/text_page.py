"""Generates docs/text.md from benchmarks/results/text.json, which `python -m benchmarks.text` writes.

python -m benchmarks.text_page
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from scipy.stats import t

from benchmarks.gpu_page import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "text.json"
PAGE = ROOT / "docs" / "text.md"

NAMES = {
    "batch_32": "in-batch, batch 32",
    "batch_256": "in-batch, batch 256 by `cached_backward`",
    "queue": "queue, batch 32",
    "moving_average": "moving average, batch 32",
}
SETTINGS = {
    "batch_32": "{per_intent} utterances per intent", "batch_256": "{per_intent} utterances per intent",
    "queue": "{rows:,} rows", "moving_average": "momentum {momentum}",
}  # fmt: skip
METRICS = {"recall@1": "R@1", "map@r": "MAP@R"}
# Batches of 32 of one seed are the same for every arm that has them, so these are compared seed by seed.
COMPARISONS = (
    ("batch_256", "batch_32", False), ("queue", "batch_32", True), ("moving_average", "batch_32", True),
    ("queue", "batch_256", False), ("moving_average", "batch_256", False),
)  # fmt: skip

HEAD = """# Does a memory help to fine-tune a sentence encoder?

[examples/text_memory.py](../examples/text_memory.py) fine-tunes MiniLM (all-MiniLM-L6-v2, 22.7 M parameters) on some of the
intents of CLINC150 and scores it on others. `benchmarks/text.py` runs it for four sources of negatives, and
`python -m benchmarks.text_page` generates this page from the result, `benchmarks/results/text.json`.

- **Data.** 150 intents with 150 utterances each, in alphabetical order. The first 75 train, with the 100 utterances each of the
  list `train`. The others test, with all of their 11,250 utterances, each of which is a query for the rest.
- **Arms.** In-batch negatives at batch 32; the same at batch 256, embedded in chunks by `cached_backward`; a queue at batch 32;
  a memory with a moving average of each training utterance at batch 32. The untouched model fills both memories first.
- **Everything else is the same.** SupCon with temperature 0.1, AdamW with weight decay 0.01, a constant learning rate after 20
  iterations of warm-up, dropout as in the model, batches of a few utterances per intent. The weights start in half precision.
  A batch of 256 is made of eight consecutive batches of 32, so its arm sees eight times as many utterances per iteration.
- **Choice.** The settings that differ between the arms are those with the best MAP@R on 25 of the training intents, after
  training on the other 50, with one seed. Every arm has the same number of trials and iterations. The test intents are
  scored once, after the choice.
"""


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def values(results: dict[str, Any], arm: str, metric: str) -> list[float]:
    """The score of each seed, in the order of the seeds."""
    runs = sorted((run for run in results["runs"] if run["arm"] == arm), key=lambda run: run["seed"])
    return [next(iter(run["scores"].values()))[metric] for run in runs]


def interval(first: list[float], second: list[float], paired: bool) -> tuple[float, float]:
    """The difference of two means and half the width of its 95 % t interval, paired or Welch's.

    Example:
        >>> [round(x, 3) for x in interval([3.0, 4.0, 8.0], [1.0, 2.0, 3.0], paired=True)]
        [3.0, 4.303]
    """
    difference = statistics.mean(first) - statistics.mean(second)
    if paired:
        error = statistics.stdev(a - b for a, b in zip(first, second, strict=True)) / math.sqrt(len(first))
        return difference, float(t.ppf(0.975, len(first) - 1)) * error
    parts = [statistics.variance(side) / len(side) for side in (first, second)]
    freedom = (
        sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (first, second))) if any(parts) else 1
    )
    return difference, float(t.ppf(0.975, freedom)) * math.sqrt(sum(parts))


def scores(results: dict[str, Any]) -> str:
    rows = [["untouched model", "", "", "", *(percent(results["untouched"]["test"][metric]) for metric in METRICS), ""]]
    for arm, name in NAMES.items():
        chosen = results["chosen"][arm]
        times = [run["seconds"] / chosen["iterations"] for run in results["runs"] if run["arm"] == arm]
        by_metric = (values(results, arm, metric) for metric in METRICS)
        rows.append([
            name, f"{chosen['rate']:g}", SETTINGS[arm].format(**chosen["settings"]), str(chosen["iterations"]),
            *(f"{percent(statistics.mean(each))} ± {percent(statistics.stdev(each))}" for each in by_metric),
            f"{1000 * statistics.median(times):.0f}",
        ])  # fmt: skip
    heads = [
        "negatives",
        "learning rate",
        "setting",
        "iterations",
        *(f"{name}, %" for name in METRICS.values()),
        "ms per iteration",
    ]
    return table(heads, rows)


def comparisons(results: dict[str, Any]) -> tuple[str, str]:
    """The table of differences, and a sentence about those that are significant."""
    rows, significant = [], []
    for first, second, paired in COMPARISONS:
        row = [f"{NAMES[first]} − {NAMES[second]}", "paired" if paired else "Welch"]
        for metric, shown in METRICS.items():
            difference, half = interval(values(results, first, metric), values(results, second, metric), paired)
            row.append(f"{100 * difference:+.2f} ± {percent(half)}")
            if abs(difference) > half:
                word = "higher" if difference > 0 else "lower"
                significant.append(f"- {shown} is {word} with {NAMES[first]} than with {NAMES[second]}.")
        rows.append(row)
    heads = ["difference, in points", "95 % t interval", *METRICS.values()]
    if not significant:
        return table(heads, rows), "Every interval contains 0: none of these differences is significant.\n"
    count = f"{len(significant)} of {len(rows) * len(METRICS)} intervals do not contain 0:\n\n"
    return table(heads, rows), count + "\n".join(significant) + "\n"


def trials(results: dict[str, Any]) -> str:
    def best(arm: str, rate: float) -> float:
        some = [trial for trial in results["trials"] if (trial["arm"], trial["rate"]) == (arm, rate)]
        return max(score["map@r"] for trial in some for score in trial["scores"].values())

    rows = [[NAMES[arm], *(percent(best(arm, rate)) for rate in results["rates"])] for arm in NAMES]
    rounds = len({trial["round"] for trial in results["trials"]})
    ends = []
    for arm, chosen in results["chosen"].items():
        if chosen["rate"] in (results["rates"][0], results["rates"][-1]):
            ends.append(f"the learning rate of {NAMES[arm]}")
        if chosen["iterations"] in (results["checkpoints"][0], results["checkpoints"][-1]):
            ends.append(f"the iterations of {NAMES[arm]}")
    text = (
        f"Each arm had {len(results['trials']) // len(NAMES)} trials of {results['checkpoints'][-1]} iterations: "
        f"{len(results['rates'])} learning rates{'' if rounds == 1 else f' and {rounds} values of its setting'}, scored after "
        f"{', '.join(map(str, results['checkpoints']))} iterations. The table shows the best MAP@R on the held-out intents "
        f"for each rate, in %; the untouched model has {percent(results['untouched']['held out']['map@r'])}.\n"
    )
    at_end = f"\nAt an end of what was tried: {', '.join(ends)}.\n" if ends else ""
    return text + "\n" + table(["learning rate", *(f"{rate:g}" for rate in results["rates"])], rows) + at_end


def page() -> str:
    if not RESULTS.exists():
        return HEAD
    results = json.loads(RESULTS.read_text())
    differences, verdict = comparisons(results)
    seeds = len({run["seed"] for run in results["runs"]})
    commit = f", commit {results['commit']}" if results["commit"] else ""
    machine = f"{results['device']}, torch {results['torch']}, TF32, {results['workers']} runs at a time"
    return (
        f"{HEAD}\n## What came out?\n\nMean ± standard deviation over {seeds} seeds, which fix batches and dropout. "
        f"{machine}, {results['date'][:10]}{commit}.\n\n{scores(results)}\n{differences}\n{verdict}\n"
        "Each interval stands for itself, without a correction for their number, and covers the seeds only: another split of "
        f"the intents may differ by more.\n\n## How were the settings chosen?\n\n{trials(results)}"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
