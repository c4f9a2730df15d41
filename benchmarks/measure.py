"""How the benchmarks measure: interleaved repeats, medians, peak memory, and what machine it was."""

import platform
import statistics
import time
from collections.abc import Callable

import torch


def medians(cases: dict[str, Callable[[], object]], repeats: int = 7, warm_up: int = 2) -> dict[str, float]:
    """Seconds of each case. The cases take turns, so that a slow moment of the machine hits all of them alike."""
    for call in cases.values():
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, call in cases.items():
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in times.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that torch held at once during a call, beyond what was there before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
