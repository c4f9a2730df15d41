"""What the server shows: one index, or two to compare, replaced as a whole when `xbm index` has updated them."""

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from xbm.errors import InputError, XbmError
from xbm_app.search.searcher import Searcher

LOOK_SECONDS = 1.0  # between two looks at whether an index has been updated


class Content:
    """What is shown at one time. A request takes it once and keeps to it.

    Attributes:
        searchers: one or two.
        names: of their runs, with their parent folders if both runs have the same name.
        recalls: recall@10 of each index against exact search; None if it was not measured.
        labels: (label, number of images) of the first index.
    """

    def __init__(self, searchers: Sequence[Searcher]) -> None:
        if not 1 <= len(searchers) <= 2:
            raise InputError(f"give one index, or two to compare, got {len(searchers)}")
        self.searchers = tuple(searchers)
        self.names = [s.name for s in searchers]
        if len(set(self.names)) < len(searchers):
            self.names = ["/".join(s.catalogue.get("run").split("/")[-2:]) for s in searchers]
        self.recalls = [s.catalogue.get("recall@10", 1.0) for s in searchers]
        self.labels = searchers[0].catalogue.labels()


class Current:
    """Holds the current content.

    Args:
        searchers: one or two that hold their content.
    """

    def __init__(self, searchers: Sequence[Searcher]) -> None:
        self.content = Content(searchers)
        self._unreadable = False

    def refresh(self) -> None:
        """Switches to indexes that have been updated; if one cannot be read, keeps what there is and says so once."""
        try:
            newer = [searcher.newer() for searcher in self.content.searchers]
            if any(newer):
                self.content = Content([new or old for new, old in zip(newer, self.content.searchers)])
            self._unreadable = False
        except (XbmError, OSError, sqlite3.Error) as error:
            if not self._unreadable:
                self._unreadable = True
                print(f"note: still showing the index as it was: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Looks for updates in the background."""
        ended = Event()

        def look() -> None:
            while not ended.wait(LOOK_SECONDS):
                self.refresh()

        Thread(target=look, name="refresh", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
