"""Work done ahead in threads, with results in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], workers: int, ahead: int) -> Generator[T, None, None]:
    """Runs `calls` in `workers` threads, at most `ahead` calls in advance, and yields the results in order.

    Threads suffice because Pillow and NumPy release the GIL. An exception is raised unchanged, at its place in the order.
    Leaving the loop early, also by Ctrl-C, waits for the running calls and drops the rest.

    Only queues written in C are shared with the threads. A `concurrent.futures` pool is not safe under Ctrl-C: if that
    arrives while the loop holds one of its locks, the threads and then the program wait forever.

    Example:
        >>> from functools import partial
        >>> list(in_order((partial(pow, 2, n) for n in range(5)), workers=2, ahead=3))
        [1, 2, 4, 8, 16]
    """
    if workers < 1:
        for call in calls:
            yield call()
        return
    tasks: SimpleQueue[tuple[Callable[[], T], SimpleQueue] | None] = SimpleQueue()
    pending, running = deque[SimpleQueue](), list[Thread]()
    try:
        for k in range(workers):
            thread = Thread(target=_work, args=(tasks,), name=f"xbm-data-{k}", daemon=True)
            thread.start()
            running.append(thread)
        for call in calls:
            answer: SimpleQueue = SimpleQueue()
            tasks.put((call, answer))
            pending.append(answer)
            if len(pending) > ahead:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())
    finally:
        with suppress(Empty):
            while True:
                tasks.get_nowait()  # what no thread has begun
        for _ in running:
            tasks.put(None)
        for thread in running:
            thread.join()


def _work(tasks: SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        call, answer = task
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))


def _result(answer: SimpleQueue) -> Any:
    result, error = answer.get()
    if error is not None:
        raise error
    return result


def default_workers() -> int:
    """The number of decoding threads: one per core, at most eight, since more would mostly wait for each other."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
