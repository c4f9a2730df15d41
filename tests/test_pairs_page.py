"""What docs/pairs.md says of a memory for two towers is what the result file says."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pairs.md").read_text()
ARMS = json.loads((ROOT / "benchmarks" / "results" / "cpu-two-towers.json").read_text())["arms"]
ALONE = ARMS["in-batch, batch 32"]["runs"]
T_975 = 4.302653  # Student's t with 2 degrees of freedom: 3 seeds


def differences(arm: str) -> dict[str, tuple[float, float]]:
    """Mean and half the 95 % interval of the paired difference from in-batch negatives, in points, by metric."""
    paired = {m: [100 * (a[m] - b[m]) for a, b in zip(ARMS[arm]["runs"], ALONE, strict=True)] for m in ALONE[0]}
    return {m: (statistics.mean(each), T_975 * statistics.stdev(each) / 3**0.5) for m, each in paired.items()}


def written(mean: float, half: float) -> str:
    return f"{mean:+.1f} ± {half:.1f}".replace("-", "−")


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("in-batch negatives", "in-batch, batch 32"),
        ("memory of 1,024 pairs", "memory of 1,024, batch 32"),
        ("memory of 4,096 pairs", "memory of 4,096, batch 32"),
    ],
)
def test_the_rows_of_the_table(name, arm):
    scores = [[100 * run[metric] for run in ARMS[arm]["runs"]] for metric in ALONE[0]]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    cells = [f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in scores]
    assert row.split(" | ")[2:] == [*cells[:-1], f"{cells[-1]} |"]


def test_the_smaller_memory_is_above_but_for_one_metric():
    found = differences("memory of 1,024, batch 32")
    assert all(0.55 <= mean < 0.85 for mean, _ in found.values())
    assert [metric for metric, (mean, half) in found.items() if mean <= half] == ["code@1"]
    assert f"R@1 of code ({written(*found['code@1'])})" in PAGE


def test_the_larger_memory_is_nowhere_above_and_below_for_two_metrics():
    found = differences("memory of 4,096, batch 32")
    assert all(mean <= 0 for mean, _ in found.values())
    assert [metric for metric, (mean, half) in found.items() if mean < -half] == ["docstring@5", "docstring@10"]
    assert f"({written(*found['docstring@5'])} and {written(*found['docstring@10'])})" in PAGE


def test_the_table_of_memory_is_that_of_the_result():
    for case in json.loads((ROOT / "benchmarks" / "results" / "cpu-cached-backward.json").read_text())["cases"]:
        both = case["embeddings_and_gradient_bytes"]
        parts = [case["plain_bytes"], case["cached_bytes"], both, case["cached_bytes"] - both]
        row = " | ".join([f"{case['inputs']:,}", *(f"{part / 1e6:.1f}" for part in parts)])
        assert f"| {row} |" in PAGE
