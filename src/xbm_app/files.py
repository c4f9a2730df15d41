"""Files that survive a kill at any moment, and damage that is noticed: atomic replacement, checksums, locks, checkpoints.

`checksums.json` in a folder lists the CRC-32 of the files there that are read back: `replacing(path, checksum=True)` enters
a file, `verify(path)` compares it. Archives (.pt, .npz) need no entry: they carry a CRC-32 of each record.
"""

import csv
import errno
import json
import os
import re
import stat
import sys
import threading
import warnings
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from tokenize import TokenError
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from xbm.errors import DamagedFileError, InputError, XbmError

if TYPE_CHECKING:
    import numpy as np
    import torch

FORMAT = 1  # of a checkpoint
# what reading a damaged or foreign file raises, besides an OSError
MALFORMED = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, EOFError,
    BadZipFile, UnpicklingError, TokenError, zlib.error, csv.Error,
)  # fmt: skip
CHUNK = 1 << 20  # bytes read at once
CHECKSUMS = "checksums.json"  # {file name: its checksum, and the one before}
LISTED = re.compile(r"[0-9a-f]{8}-\d{1,18}")  # CRC-32 and length
WINDOWS = os.name == "nt"
_opened: dict[tuple[int, int], IO[bytes]] = {}  # by device and inode, which cannot be used again while the file is open
_opening = threading.Lock()


@contextmanager
def replacing(path: Path, checksum: bool = False) -> Iterator[Path]:
    """Yields a temporary path; on success the file written there is synced and atomically replaces `path`.

    Args:
        checksum: also enter the file in its folder's list, for `verify`.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("all of it")
        >>> target.read_text()
        'all of it'
    """
    temporary = path.with_name(f"{path.stem}.part{path.suffix}")  # numpy insists on the suffix
    temporary.unlink(missing_ok=True)  # left by a kill; or a link, which must not be followed
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        _sync(temporary)
        if checksum:  # before the file takes its name: after a kill in between, the list has the old and the new checksum
            record_checksum(path, temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, checksum: bool = False) -> None:
    """Atomically replaces the file at `path`, and creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, checksum) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, checksum: bool = False) -> None:
    write_bytes(path, f"{json.dumps(value, indent=2)}\n".encode(), checksum)


def verify(path: Path, growing: bool = False, warn: bool = True, remedy: str = "restore it") -> Path:
    """Returns `path` after comparing the file with its checksum; a file that does not exist is left to the reader.

    Args:
        growing: rows may have been appended since the checksum was taken.
        warn: warn about a file without a checksum, once per folder that an older version wrote.

    Raises:
        DamagedFileError: the file was damaged or edited.
    """
    _no_pipe(path)
    expected = checksums(path.parent)
    if not path.is_file():
        return path
    if expected is None or path.name not in expected:
        if warn:
            _warn_unverified(path.parent)
        return path
    size = path.stat().st_size
    for each in expected[path.name]:
        length = int(each.partition("-")[2])
        if (size == length or (growing and size > length)) and _checksum(path, length) == each:
            return path
    if (checksums(path.parent) or {}).get(path.name) != expected[path.name]:  # another process has replaced it meanwhile
        return verify(path, growing, warn, remedy)
    raise DamagedFileError(
        path,
        f"{path} is not as xbm wrote it (damaged or edited): {remedy}, or delete {path.parent / CHECKSUMS} to use the files "
        "there unverified",
    )


def open_in_place(path: Path) -> int:
    """Opens or creates a file that is changed in place, as one descriptor. It is neither truncated nor waited for.

    Raises:
        InputError: it is a link, which could lead to a file of the user's, or a pipe, or anything else but a file.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        refuse_special(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _special(path)
    return descriptor


def refuse_special(path: Path) -> None:
    """Raises InputError if there is something at `path`, a link included, that is not a file to be changed in place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _special(path)


def _special(path: Path) -> InputError:
    return InputError(f"{path} is a link, a pipe, or not a file at all: remove it")


def _no_pipe(path: Path) -> Path:
    if path.is_fifo() and not path.is_relative_to("/dev"):  # where the shell puts what it passes to `--config <(...)`
        raise InputError(f"{path} is a pipe, not a file: restore it")
    return path


@cache
def _warn_unverified(folder: Path) -> None:
    reason = "of an older version, or of an update that has not ended"
    warnings.warn(f"{folder} has files without checksums ({reason}): they are not verified", stacklevel=1)


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object that `write_json` wrote with a checksum."""
    with reading(path):
        content = json.loads(verify(path).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises what malformed content of `path` causes in its body as a `DamagedFileError`."""
    try:
        yield
    except (XbmError, getattr(sys.modules.get("torch"), "OutOfMemoryError", XbmError)):
        raise
    except MALFORMED as error:
        cause = f"{type(error).__name__}: {shorten(str(error), 120, placeholder=' …')}"
        raise DamagedFileError(path, f"{path} is damaged or not what xbm writes there ({cause}): restore it") from error


def record_checksum(path: Path, content: Path | None = None) -> None:
    """Enters `path` in the list of its folder as it is, or as it will be and still is, if `content` is about to replace it."""
    try:
        listed = checksums(path.parent) or {}
    except DamagedFileError:
        listed = {}
    if content is None:
        listed[path.name] = [_checksum(path)]
    else:
        before = listed.get(path.name) or ([_checksum(path)] if path.is_file() else [])
        listed[path.name] = [_checksum(content), *before[:1]]
    write_json(path.parent / CHECKSUMS, listed)


def forget_checksum(path: Path) -> None:
    """Removes `path` from the list of its folder: it is about to be changed in place."""
    try:
        listed = checksums(path.parent) or {}
    except DamagedFileError:
        listed = {}
    if listed.pop(path.name, None):
        write_json(path.parent / CHECKSUMS, listed)


def checksums(folder: Path) -> dict[str, list[str]] | None:
    """The checksums of the files in a folder, each with the one before, if any; None if the folder has no list."""
    path = folder / CHECKSUMS
    try:
        listed = json.loads(_no_pipe(path).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        listed = None
    entries = list(listed.values()) if isinstance(listed, dict) else [None]
    if not all(isinstance(each, list) and all(LISTED.fullmatch(str(sum)) for sum in each) for each in entries):
        raise DamagedFileError(path, f"{path} cannot be read: delete it to use the files beside it unverified")
    return listed


def _checksum(path: Path, length: int | None = None) -> str:
    """CRC-32 and length of a file, or of its first `length` bytes."""
    value, size = 0, 0
    with database_file(path) if path.suffix == ".sqlite" else open(path, "rb") as file:
        while chunk := file.read(CHUNK if length is None else min(CHUNK, length - size)):
            value, size = zlib.crc32(chunk, value), size + len(chunk)
    return f"{value:08x}-{size}"


@contextmanager
def database_file(path: Path) -> Iterator[IO[bytes]]:
    """An SQLite file from its start, for one reader at a time, in a process that also uses it as a database.

    POSIX takes away all locks that a process holds on a file as soon as the process closes any descriptor of it. SQLite would
    not notice: another process that closes the database would then take itself for the last one, and delete the write-ahead
    log from under the snapshot that is being read. So such a file is opened once, and stays open, except on Windows, which
    has other locks.
    """
    if WINDOWS:
        with open(path, "rb") as file:
            yield file
        return
    with _opening:
        key = _identity(path.stat())
        if key not in _opened:
            kept: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
            key = _identity(os.fstat(kept.fileno()))  # it may have been replaced meanwhile
            _opened.setdefault(key, kept)
        _opened[key].seek(0)
        yield _opened[key]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Atomically replaces the checkpoint at `path`.

    Raises:
        InputError: the disk is full or not writable; an earlier checkpoint at `path` is kept.
    """
    import torch

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError of its own while it handles a failed write
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _write_error(path, cause, path) from None


def read_checkpoint(path: Path, device: "torch.device | str" = "cpu") -> dict[str, Any]:
    """Reads what `write_checkpoint` wrote, without running code that the file may contain.

    Raises:
        InputError: the file does not exist or was written by a newer version.
        DamagedFileError: the file is truncated, damaged, or not a checkpoint.
    """
    import torch

    try:
        verify_archive(path)
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: there is nothing to resume or load") from None
    except MALFORMED as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        others = sorted(other for other in path.parent.glob("*.pt") if other != path and ".part" not in other.name)
        remedy = f"copy {others[0]} over it" if others else "restore it from a backup"
        raise DamagedFileError(
            path, f"{path} is not a readable checkpoint (truncated, damaged, or containing code): {remedy}, or start a new run"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise DamagedFileError(path, f"{path} is not a checkpoint of xbm: pass a run folder created by `xbm train`")
    if state["format"] > FORMAT:
        raise InputError(f"{path} has format {state['format']}, but this version reads formats up to {FORMAT}: upgrade xbm")
    return state


def verify_archive(path: Path) -> None:
    """Compares the checksums in an archive of `torch.save`, which `torch.load` does not.

    Raises:
        BadZipFile: a record is damaged, or it is another archive.
    """
    with ZipFile(_no_pipe(path)) as archive:
        damaged = archive.testzip()
        if damaged is not None or not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise BadZipFile(f"{damaged} is damaged" if damaged else "not an archive of torch.save")


def read_arrays(path: Path, without: Container[str] = ()) -> dict[str, "np.ndarray"]:
    """Reads an .npz file after comparing its checksums, as numpy does only for a record that it reads to the end."""
    import numpy as np

    with open(_no_pipe(path), "rb") as opened:  # numpy leaves a damaged file open
        file = np.load(opened, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds a single array: save the arrays together with numpy.savez")
        if file.zip.testzip() or any(each.comment for each in file.zip.infolist()):  # one takes the place of other records
            raise BadZipFile("a record or the directory is damaged")
        return {name: file[name] for name in file.files if name not in without}


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Raises an OSError about a run folder (disk full, not writable, gone) as an `InputError` that says how to continue."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"could not write to {error.filename or folder}, which is not a folder: use another --out") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise InputError(f"could not write to {folder} ({error.strerror}): use another --out") from None
        raise _write_error(error.filename or folder, error, folder / "checkpoints" / "last.pt") from None


@contextmanager
def locked(folder: Path, writes: bool = True) -> Iterator[None]:
    """Locks a run folder for this process: two processes that train in one folder would spoil each other's files.

    The folder is created before anything is written to it, and removed if nothing was.

    Args:
        writes: whether this is the process that writes, of those that train together.
    """
    if not writes:
        yield
        return
    descriptor = _open_locked(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # unless it is empty
            folder.rmdir()  # while it is locked: nobody else's
        os.close(descriptor)


def _open_locked(folder: Path) -> int:
    """Creates and locks a folder, or creates it anew if its last holder removed it, as empty, before the lock was ours."""
    for _ in range(9):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            # Windows opens no folders, so there a file inside is locked instead
            descriptor = open_in_place(folder / "lock") if WINDOWS else os.open(folder, os.O_RDONLY)
            free = lock(descriptor)
            if free and (WINDOWS or (folder.exists() and os.path.samestat(os.fstat(descriptor), os.stat(folder)))):
                return descriptor
            os.close(descriptor)
            if not free:
                break
    raise InputError(f"{folder} is being trained by another process: wait until it ends, or stop it")


def lock(descriptor: int) -> bool:
    """Locks an open file until it is closed or the process ends; False if another process holds the lock."""
    try:
        if WINDOWS:
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined, unused-ignore]
    except (BlockingIOError, PermissionError):  # the latter on Windows
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _write_error(path: str | Path, error: OSError, checkpoint: Path) -> InputError:
    kept = "the previous checkpoint is intact" if checkpoint.exists() else "no checkpoint has been written yet"
    remedy = "free some disk space and continue with --resume"
    return InputError(f"could not write {path} ({error.strerror or error}); {kept}: {remedy}")


def _sync(path: Path) -> None:
    if WINDOWS and path.is_dir():  # it can neither be opened nor needs to be
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows writes out only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
