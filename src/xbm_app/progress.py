"""Progress: a bar with rate and time left on a terminal or in a notebook, a plain line every ten seconds elsewhere."""

import html
import math
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")

# what a terminal may act upon instead of showing it: control characters, directions of writing, halves of characters
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

LINE_SECONDS = 10.0  # between two plain lines
BAR_SECONDS = 0.1  # between two updates of a bar
NOTEBOOK_SECONDS = 0.5  # between two of its line in a notebook, each of which is a message to the browser


def printable(text: str) -> str:
    r"""Text from outside, such as a file name, as one line that is safe to print.

    Example:
        >>> print(printable("a" + chr(27) + "[2Jb.png"))
        a\u001b[2Jb.png
    """
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def tell(sentence: str) -> None:
    """Prints a message: on stderr, since stdout belongs to results; in a notebook on stdout, where it is not red."""
    print(sentence, file=sys.stdout if in_notebook() else sys.stderr, flush=True)


def note(error: Exception) -> None:
    """Prints what was left out, and why, while the work goes on."""
    print(f"note: {printable(str(error))}", file=sys.stderr)


class NotebookLine:
    """A line with a bar in the output of a notebook's cell; each `show` replaces it."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(""), display_id=True)

    def show(self, text: str, done: int, total: int | None) -> None:
        bar = "" if total is None else f'<progress value="{done}" max="{total}"></progress> '
        self._handle.update(self._html(f"<code>{bar}{html.escape(text)}</code>"))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; in the terminal of IPython it is not."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def track(items: Iterable[T], description: str, total: int | None = None, quiet: bool = False) -> Iterator[T]:
    """Yields `items` and shows how many have been processed.

    Example:
        >>> list(track([1, 2, 3], "reading", quiet=True))
        [1, 2, 3]
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if quiet:
        yield from items
        return
    if in_notebook():
        yield from _in_notebook(items, description, total)
        return
    if not sys.stderr.isatty():
        yield from _lines(items, description, total)
        return
    from rich import progress as bar
    from rich.console import Console as Terminal

    columns = (
        bar.TextColumn("{task.description}"),
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TimeElapsedColumn(),
        bar.TimeRemainingColumn(),
    )
    with bar.Progress(*columns, console=Terminal(stderr=True)) as progress:
        yield from progress.track(items, total=total, description=description)


def _in_notebook(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    line, due, done = None, time.monotonic() + NOTEBOOK_SECONDS, 0  # what is done at once shows nothing
    for done, item in enumerate(items):
        if (now := time.monotonic()) >= due:
            line, due = line or NotebookLine(), now + NOTEBOOK_SECONDS
            line.show(f"{description}: {done}{f' of {total}' if total else ''}", done, total)
        yield item
    if line is not None:
        line.show(f"{description}: {done + 1}{f' of {total}' if total else ''}", done + 1, total)


def _lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last >= LINE_SECONDS and done:
            last = now
            left = f" of {total}{time_left(start, now, done, total)}" if total else ""
            print(f"{description}: {done}{left}", file=sys.stderr, flush=True)
        yield item


def time_left(start: float, now: float, done: int, total: int) -> str:
    return f", about {(now - start) / done * (total - done):.0f} s left" if done else ""


class Console:
    """Shows the progress of a training run: iterations, speed, time left, and a line of figures.

    Attributes:
        speed: iterations per second; NaN before the first call of `advance`.
        text: the latest figures.
        next_update: the time (`time.monotonic`) from which `advance` has something new to show.
    """

    def __init__(self, total: int, start: int, quiet: bool) -> None:
        self.total, self.done, self.first, self.quiet = total, start, start, quiet
        self.text = ""
        self.speed = math.nan
        self.next_update = math.inf
        self._bar: Any = None
        self._line: NotebookLine | None = None

    def __enter__(self) -> "Console":
        self._start = time.monotonic()
        if self.quiet:
            return self
        self.next_update = self._start + LINE_SECONDS
        if in_notebook():
            self._line, self.next_update = NotebookLine(), self._start
        elif sys.stderr.isatty():
            self._open_bar()
        return self

    def _open_bar(self) -> None:
        from rich import progress
        from rich.console import Console as Terminal
        from rich.text import Text

        class Bar(progress.Progress):
            """Has the figures on a line of their own: side by side they do not fit into 80 columns."""

            def get_renderables(bar) -> Any:  # noqa: N805
                yield from super().get_renderables()
                yield Text(self.text, no_wrap=True, overflow="ellipsis")

        self._bar = Bar(
            progress.TextColumn("training"), progress.BarColumn(bar_width=20), progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"), progress.TimeRemainingColumn(), console=Terminal(stderr=True),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self.total, completed=self.done, speed="")
        self._bar.start()
        self.next_update = self._start

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        sentence = printable(sentence)
        if self._bar is not None:
            self._bar.console.print(sentence, highlight=False, markup=False)
        elif not self.quiet:
            tell(sentence)

    def track(self, items: Iterable[T], description: str, total: int) -> Generator[T, None, None]:
        """Yields `items` that are not iterations and shows their progress. Their time does not count for the speed."""
        start = time.monotonic()
        try:
            if self._bar is None:
                yield from track(items, description, total, self.quiet)
                return
            for done, item in enumerate(items):
                left = time_left(start, time.monotonic(), done, total)
                self.text = f"{description}: {done} of {total}{left}"
                yield item
        finally:
            self.text = ""
            now = time.monotonic()
            self._start += now - start
            if not self.quiet:
                self.next_update = now + (LINE_SECONDS if self._bar is None and self._line is None else 0)

    def advance(self, done: int) -> None:
        """Shows that `done` iterations are complete. Cheap enough for every iteration, needed only from `next_update` on."""
        now = time.monotonic()
        self.done = done
        if now > self._start:
            self.speed = (done - self.first) / (now - self._start)
        left = (self.total - done) / self.speed if self.speed else math.inf
        if self._bar is not None:
            self._bar.update(self._task, completed=done, speed=f"{self.speed:.1f} it/s")
            self.next_update = now + BAR_SECONDS
        elif self._line is not None:
            self.next_update = now + NOTEBOOK_SECONDS
            self._line.show(f"{done}/{self.total} · {self.speed:.1f} it/s · {left:.0f} s left · {self.text}", done, self.total)
        elif now >= self.next_update:
            self.next_update = now + LINE_SECONDS
            print(f"{done}/{self.total} · {self.speed:.1f} it/s · {left:.0f} s left · {self.text}", file=sys.stderr, flush=True)
