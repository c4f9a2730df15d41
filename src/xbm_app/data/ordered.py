"""Work done ahead by threads, handed over in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], workers: int, ahead: int) -> Generator[T, None, None]:
    """The results of `calls` in their order, made by `workers` threads that run at most `ahead` calls in front.

    Threads, since Pillow and NumPy let go of the interpreter while they work. A call's exception is raised as it is, at
    its place in the order. Leaving the loop early, by Ctrl-C too, waits for the calls under way and drops the rest.

    Nothing but queues written in C is shared with the threads. A pool of `concurrent.futures` is not made for Ctrl-C: where
    that comes while the loop holds one of its locks, the threads and then the program wait for ever.

    Example:
        >>> from functools import partial
        >>> list(in_order((partial(pow, 2, n) for n in range(5)), workers=2, ahead=3))
        [1, 2, 4, 8, 16]
    """
    if workers < 1:
        for call in calls:
            yield call()
        return
    given: SimpleQueue[tuple[Callable[[], T], SimpleQueue] | None] = SimpleQueue()
    pending, running = deque[SimpleQueue](), list[Thread]()
    try:
        for k in range(workers):
            thread = Thread(target=_work, args=(given,), name=f"xbm-data-{k}", daemon=True)
            thread.start()
            running.append(thread)
        for call in calls:
            answer: SimpleQueue = SimpleQueue()
            given.put((call, answer))
            pending.append(answer)
            if len(pending) > ahead:
                yield _taken(pending.popleft())
        while pending:
            yield _taken(pending.popleft())
    finally:
        with suppress(Empty):
            while True:
                given.get_nowait()  # what no thread has begun
        for _ in running:
            given.put(None)
        for thread in running:
            thread.join()


def _work(given: SimpleQueue) -> None:
    while (task := given.get()) is not None:
        call, answer = task
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))


def _taken(answer: SimpleQueue) -> Any:
    result, error = answer.get()
    if error is not None:
        raise error
    return result


def default_workers() -> int:
    """Threads for decoding: one a core, but no more than eight, which wait for each other enough already."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
