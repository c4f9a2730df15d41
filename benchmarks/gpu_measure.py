"""Measurements for the GPU benchmarks: calls between events, CUDA graphs, peak memory, the time to read a memory once."""

import csv
import json
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], Any]


class Record:
    """Writes measurements to disk after every case. The error of a failed case is recorded and the next case runs."""

    def __init__(self, out: Path, part: str) -> None:
        self.part, self.json, self.csv = part, out / f"{part}.json", out / f"{part}.csv"
        self.cases: list[dict[str, Any]] = []
        with self.csv.open("w") as f:
            csv.writer(f).writerow(["part", "case", "repeat", "milliseconds"])

    def add(self, case: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            result = call()
        except Exception:
            result = {"error": traceback.format_exc()[-2000:]}
        times = result.pop("repeats", [])
        with self.csv.open("a") as f:
            csv.writer(f).writerows([self.part, case, k, f"{t:.6f}"] for k, t in enumerate(times))
        self.cases.append({"part": self.part, "case": case, **result})
        self.json.write_text(json.dumps(self.cases, indent=1))
        short = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in result.items() if k != "error"}
        print(f"{self.part:13} {case:46} {short} {result.get('error', '')[-400:]}", flush=True)
        return result


def timed(calls: list[Call], repeats: int = 15, seconds: float = 0.15) -> dict[str, Any]:
    """Returns milliseconds per call: the calls take turns in batches between two events; median over the batches."""
    for call in calls * 2:
        call()

    def batch(n: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        for k in range(n):
            calls[k % len(calls)]()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / n

    once = batch(len(calls))
    n = max(len(calls), min(400, int(seconds * 1000 / repeats / max(once, 1e-3))))
    times = [batch(n) for _ in range(repeats)]
    return {"ms": statistics.median(times), "least": min(times), "most": max(times), "calls": n, "repeats": times}


def extra_megabytes(call: Call) -> float:
    """Returns the peak memory of a call, beyond what was allocated before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def captured(step: Call) -> Call:
    """Captures a step as a CUDA graph and returns its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@triton.jit
def _read(x, out, per, N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per
    total = tl.zeros((N,), tl.int32)
    for k in range(0, per, N):
        total += tl.load(x + start + k + tl.arange(0, N))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def reading(rows: Tensor, repeats: int = 8) -> Call:
    """Returns a call that only reads the memory, except for its last few kilobytes: a lower bound for any step."""
    words = rows.view(torch.int32).view(-1)
    programs = torch.cuda.get_device_properties(0).multi_processor_count * repeats
    per = words.numel() // programs // 2048 * 2048
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    return lambda: _read[(programs,)](words, out, per, 2048, num_warps=4)
