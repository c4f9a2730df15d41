"""Measurements for the CPU benchmarks: medians of interleaved repeats, peak memory, and the machine's description."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def medians(cases: dict[str, Callable[[], object]], repeats: int = 7, warm_up: int = 2) -> dict[str, float]:
    """Returns the median seconds of each case. The cases take turns, so that other load affects all of them equally."""
    for call in cases.values():
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, call in cases.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns the peak memory that torch allocated during a call, beyond what was allocated before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def process_memory(field: str, process: int | str = "self") -> int:
    """Returns a field of /proc/PROCESS/status in KiB, such as VmRSS, the resident memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {threads(torch.get_num_threads())}, torch {torch.__version__}"
