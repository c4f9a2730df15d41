"""Exact evaluation compared with pytorch-metric-learning and faiss, on the same embeddings in one process.

    python -m benchmarks.retrieval

20,000 512-d rows, 5 per class, each compared with all others. Ours computes R@1, 10, 100, 1000, MAP@R, R-precision and mAP.
AccuracyCalculator computes the first 1,000 neighbors, precision@1, R-precision and MAP@R. faiss' flat index computes the first
1,001 neighbors, from which numpy derives the recalls and MAP@R. Peak memory is the largest growth of the process.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import process_memory
from xbm.retrieval import evaluate

THREADS = 2
KS = (1, 10, 100, 1000)

Method = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def clustered(count: int, dim: int, per_class: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns shuffled unit rows around one random center per class, noisy enough to lose about a quarter of MAP@R."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) // per_class)
    centres = random.standard_normal((labels.max() + 1, dim), dtype=np.float32)
    rows = centres[labels] + 2 * random.standard_normal((count, dim), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


def ours(rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return evaluate(rows, labels, ks=KS)


def accuracy_calculator(rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    include = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
    calculator = AccuracyCalculator(include=include, k=KS[-1], device=torch.device("cpu"))
    scores = calculator.get_accuracy(torch.from_numpy(rows), torch.from_numpy(labels))
    return {"recall@1": scores["precision_at_1"], "map@r": scores["mean_average_precision_at_r"]}


def faiss_flat(rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Excludes the query itself by index. Labels are compared only as far as the metrics need."""
    import faiss

    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    _, neighbours = index.search(rows, KS[-1] + 1)
    count = len(rows)
    own = neighbours == np.arange(count)[:, None]
    own[~own.any(1), -1] = True
    others = neighbours[~own].reshape(count, -1)  # (N, 1000)
    relevant = labels[others] == labels[:, None]
    first = np.where(relevant.any(1), relevant.argmax(1), len(rows))
    scores = {f"recall@{k}": float((first < k).mean()) for k in KS}
    most = np.bincount(labels).max() - 1
    size = np.bincount(labels)[labels] - 1
    position = np.arange(1, most + 1)
    hits = relevant[:, :most] & (position <= size[:, None])
    precision = np.cumsum(hits, 1) / position * hits
    return scores | {"map@r": float((precision.sum(1) / size).mean())}


METHODS: dict[str, tuple[Method, int]] = {
    "xbm.retrieval.evaluate": (ours, 3),
    "faiss IndexFlatIP": (faiss_flat, 3),
    "AccuracyCalculator": (accuracy_calculator, 1),
}


def rows(count: int = 20_000, dim: int = 512) -> list[dict[str, float | str]]:
    """Returns one row per method: median seconds, ratio to ours, peak extra memory, and two scores that must agree."""
    import faiss

    torch.set_num_threads(THREADS)
    faiss.omp_set_num_threads(THREADS)
    small, large = clustered(2_000, dim, 5), clustered(count, dim, 5)
    runs: dict[str, list[Run]] = {name: [] for name in METHODS}
    for method, _ in METHODS.values():
        method(*small)
    for turn in range(3):  # in turns, so that other load affects all of them equally
        for name, (method, repeats) in METHODS.items():
            if turn < repeats:
                runs[name].append(_measure(method, large))
    table: list[dict[str, float | str]] = []
    for name, measured in runs.items():
        seconds = statistics.median(run.seconds for run in measured)
        table.append(
            {
                "method": name,
                "seconds": seconds,
                "ratio": seconds / float(table[0]["seconds"]) if table else 1.0,
                "extra_mib": max(run.extra_mib for run in measured),
                "recall@1": measured[0].scores["recall@1"],
                "map@r": measured[0].scores["map@r"],
            }
        )
    return table


def gpu_rows(count: int = 60_502, dim: int = 512) -> list[dict[str, Any]]:
    """Ours on a GPU at the size of Stanford Online Products' test set, compared with the bare product in blocks."""
    data, labels = clustered(count, dim, 5)
    x, y = torch.from_numpy(data).cuda(), torch.from_numpy(labels).cuda()
    block = torch.empty(1024, count, device="cuda")

    def product() -> dict[str, float]:
        for start in range(0, count - 1024, 1024):
            torch.mm(x[start : start + 1024], x.t(), out=block)
        return {}

    table: list[dict[str, Any]] = []
    for name, method in (("bare float32 product", product), ("xbm.retrieval.evaluate", lambda: evaluate(x, y, ks=KS))):
        method()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, times = torch.cuda.memory_allocated(), []
        for _ in range(5):
            start = time.perf_counter()
            scores = method()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        row: dict[str, Any] = {"method": name, "seconds": seconds, "extra_mib": extra, "repeats": times}
        row["ratio"] = seconds / float(table[0]["seconds"]) if table else 1.0
        table.append(row | {score: scores.get(score, float("nan")) for score in ("recall@1", "map@r")})
    return table


class Run(NamedTuple):
    scores: dict[str, float]
    seconds: float
    extra_mib: float


def _measure(method: Method, data: tuple[np.ndarray, np.ndarray]) -> Run:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = process_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current size
    start = time.perf_counter()
    scores = method(*data)
    return Run(scores, time.perf_counter() - start, (process_memory("VmHWM") - before) / 1024)


def _print(title: str, ratio: str, table: list[dict[str, float | str]]) -> None:
    shown = Table(title=title)
    for heading in ("method", "seconds", ratio, "peak extra MiB", "R@1", "MAP@R"):
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    for row in table:
        figures = (f"{row['seconds']:.2f}", f"{row['ratio']:.2f}", f"{row['extra_mib']:.0f}")
        shown.add_row(str(row["method"]), *figures, f"{row['recall@1']:.4f}", f"{row['map@r']:.4f}")
    Console().print(shown)


def main() -> None:
    if torch.cuda.is_available():
        _print("exact evaluation on a GPU, 60,502 × 60,502 × 512", "× product", gpu_rows())
    if find_spec("faiss") and find_spec("pytorch_metric_learning"):
        _print(f"exact evaluation, 20,000 × 20,000 × 512, {THREADS} threads", "× ours", rows())


if __name__ == "__main__":
    main()
