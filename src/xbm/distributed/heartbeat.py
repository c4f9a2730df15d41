"""Notices a rank that died, froze or cannot be reached, and ends this process with one sentence instead of waiting for it.

Each rank counts up a number in the store that brought the ranks together, and watches that of the next rank. Whoever sees it
stand still says so in the store, where all of them look. A rank that ends by an error leaves its last words there.
"""

import os
import sys
import time
from threading import Event, Thread
from types import TracebackType
from typing import Protocol

from xbm.errors import LostPeerError

PERIOD = 2.0  # seconds between two looks
SILENCE = 20.0  # seconds after which a rank that does not count up is given up
GRACE = 5.0  # seconds in which the main thread may find out by itself, by an exchange that fails
WORDS, BEAT = "xbm/last words", "xbm/beat"


class Store(Protocol):
    """What is asked of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Heartbeat:
    """A thread beside the run, from `with` to its end."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.next = store, rank, (rank + 1) % world
        self._over = Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=PERIOD)
        if error is not None:
            self._say(f"rank {self.rank}: {' '.join(str(error).split()) or type(error).__name__}")

    def _say(self, words: str) -> None:
        try:
            if not self.store.check([WORDS]):  # the first to end knows why
                self.store.set(WORDS, words)
        except Exception:  # the store's errors have no type of their own; without it there is nobody to tell
            return

    def _run(self) -> None:
        beats, theirs, heard = 0, b"", time.monotonic()
        while not self._over.wait(PERIOD):
            beats += 1
            try:
                self.store.set(f"{BEAT}/{self.rank}", str(beats))
                words = self.store.get(WORDS).decode() if self.store.check([WORDS]) else ""
                key = f"{BEAT}/{self.next}"
                now = self.store.get(key) if self.store.check([key]) else b""
            except Exception as error:  # see above
                words, now = f"the store that brought the ranks together is gone ({str(error).splitlines()[0][:80]})", b""
            if now != theirs:
                theirs, heard = now, time.monotonic()
            elif not words and time.monotonic() - heard > SILENCE:
                words = f"rank {self.next} has been silent for {SILENCE:.0f} s"
                self._say(words)
            if words:
                return self._end(words)

    def _end(self, words: str) -> None:
        if not self._over.wait(GRACE):
            # the end of the line with it: others write to the same terminal now
            sys.stderr.write(f"error: {LostPeerError(words)}\n")
            sys.stderr.flush()
            os._exit(2)
