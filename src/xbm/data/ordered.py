"""Work done ahead by threads, handed over in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], workers: int, ahead: int) -> Generator[T, None, None]:
    """The results of `calls` in their order, made by `workers` threads that run at most `ahead` calls in front.

    Threads, since Pillow and NumPy let go of the interpreter while they work. A call's exception is raised as it is, at
    its place in the order. Leaving the loop early, by Ctrl-C too, waits for the calls under way and drops the rest.

    Example:
        >>> from functools import partial
        >>> list(in_order((partial(pow, 2, n) for n in range(5)), workers=2, ahead=3))
        [1, 2, 4, 8, 16]
    """
    if workers < 1:
        for call in calls:
            yield call()
        return
    pool, pending = ThreadPoolExecutor(workers, thread_name_prefix="xbm-data"), deque[Future[T]]()
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """Threads for decoding: one a core, but no more than eight, which wait for each other enough already."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
