"""Reading the bytes of an SQLite file in a process that also uses it as a database.

POSIX takes away all locks that a process holds on a file as soon as the process closes any descriptor of it. SQLite would not
notice: another process that closes the database would then take itself for the last one, and delete the write-ahead log from
under the snapshot that is being read. So such a file is opened once, and stays open.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_opened: dict[tuple[int, int], IO[bytes]] = {}  # by device and inode, which cannot be used again while the file is open
_lock = threading.Lock()


@contextmanager
def database_file(path: Path) -> Iterator[IO[bytes]]:
    """The file from its start, for one reader at a time. It stays open, except on Windows, which has other locks."""
    if os.name == "nt":
        with open(path, "rb") as file:
            yield file
        return
    with _lock:
        key = _identity(path.stat())
        if key not in _opened:
            kept: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
            key = _identity(os.fstat(kept.fileno()))  # it may have been replaced meanwhile
            _opened.setdefault(key, kept)
        _opened[key].seek(0)
        yield _opened[key]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
