"""A progress bar with rate and time left on a terminal; a plain line now and then where there is none."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None, quiet: bool = False) -> Iterator[T]:
    """Yields `items` and shows how far along they are on stderr.

    Example:
        >>> list(track([1, 2, 3], "reading", quiet=True))
        [1, 2, 3]
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if quiet:
        yield from items
        return
    if not sys.stderr.isatty():
        yield from _lines(items, description, total)
        return
    from rich import progress as bar
    from rich.console import Console

    columns = (
        bar.TextColumn("{task.description}"),
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TimeElapsedColumn(),
        bar.TimeRemainingColumn(),
    )
    with bar.Progress(*columns, console=Console(stderr=True)) as progress:
        yield from progress.track(items, total=total, description=description)


def _lines(items: Iterable[T], description: str, total: int | None, every: float = 10.0) -> Iterator[T]:
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last >= every and done:
            last = now
            left = f" of {total}{time_left(start, now, done, total)}" if total else ""
            print(f"{description}: {done}{left}", file=sys.stderr, flush=True)
        yield item


def time_left(start: float, now: float, done: int, total: int) -> str:
    return f", about {(now - start) / done * (total - done):.0f} s left" if done else ""
