"""What a person sees of a run: speed, time left, loss, valid negatives, drift, last R@1."""

import math
import sys
import time
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from xbm.distributed import Ranks
from xbm_app import progress as plain
from xbm_app.train.config import Config

T = TypeVar("T")


class Console:
    """A progress bar on a terminal, a line every ten seconds elsewhere, nothing when quiet."""

    def __init__(self, config: Config, start: int, quiet: bool, ranks: Ranks | None = None) -> None:
        quiet = quiet or (ranks is not None and not ranks.first)
        self.total, self.done, self.first, self.quiet = config.optim.iterations, start, start, quiet
        self.text = ""
        self.speed = math.nan  # iterations per second
        self._bar: Any = None

    def __enter__(self) -> "Console":
        self._begun = self._told = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console as Terminal
            from rich.text import Text

            class Bar(progress.Progress):
                """With the figures on a line of their own: side by side they do not fit into 80 columns."""

                def get_renderables(bar) -> Any:  # noqa: N805
                    yield from super().get_renderables()
                    yield Text(self.text, no_wrap=True, overflow="ellipsis")

            self._bar = Bar(
                progress.TextColumn("training"), progress.BarColumn(bar_width=20), progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[speed]}"), progress.TimeRemainingColumn(), console=Terminal(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=self.total, completed=self.done, speed="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        if self._bar is not None:
            self._bar.console.print(sentence, highlight=False, markup=False)
        elif not self.quiet:
            print(sentence, file=sys.stderr, flush=True)

    def track(self, items: Iterable[T], description: str, total: int) -> Generator[T, None, None]:
        """Yields `items`, which are no iterations, and shows how far along they are. The speed leaves their time out."""
        begun = time.monotonic()
        try:
            if self._bar is None:
                yield from plain.track(items, description, total, self.quiet)
                return
            for done, item in enumerate(items):
                left = plain.time_left(begun, time.monotonic(), done, total)
                self.text = f"{description}: {done} of {total}{left}"
                yield item
        finally:
            self.text = ""
            now = time.monotonic()
            self._begun, self._told = self._begun + now - begun, now

    def show(self, row: dict[str, float]) -> None:
        parts = [f"loss {row['loss']:.3g}", f"negatives {row['valid_negatives_batch']:.0f} batch"]
        if not math.isnan(row.get("valid_negatives_memory", math.nan)):
            parts[-1] += f" / {row['valid_negatives_memory']:.0f} memory"
        drifts = [(k, row[f"drift_{k}"]) for k in (1000, 100, 10) if not math.isnan(row.get(f"drift_{k}", math.nan))]
        if drifts:
            parts.append(f"drift({drifts[0][0]}) {drifts[0][1]:.3f}")
        if not math.isnan(row.get("recall@1", math.nan)):
            parts.append(f"R@1 {100 * row['recall@1']:.1f}")
        self.text = " · ".join(parts)

    def advance(self, done: int) -> None:
        now = time.monotonic()
        self.done = done
        if now > self._begun:
            self.speed = (done - self.first) / (now - self._begun)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, speed=f"{self.speed:.1f} it/s")
        elif not self.quiet and now - self._told >= 10:
            self._told = now
            left = (self.total - done) / self.speed
            print(f"{done}/{self.total} · {self.speed:.1f} it/s · {left:.0f} s left · {self.text}", file=sys.stderr, flush=True)
