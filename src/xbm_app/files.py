"""Files that survive a kill at any moment: atomic replacement, the lock of a run folder, checkpoints."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from xbm.errors import DamagedFileError, InputError

if TYPE_CHECKING:
    import torch

FORMAT = 1  # of a checkpoint


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path; on success the file written there is synced and atomically replaces `path`.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("all of it")
        >>> target.read_text()
        'all of it'
    """
    temporary = path.with_name(f"{path.stem}.part{path.suffix}")  # numpy insists on the suffix
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically replaces the file at `path`, and creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, f"{json.dumps(value, indent=2)}\n".encode())


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
        with ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is not None or not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise BadZipFile(damaged or "not an archive of torch.save")
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: there is nothing to resume or load") from None
    except (BadZipFile, UnpicklingError) as error:
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


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Raises an OSError about a run folder (disk full, not writable, gone) as an `InputError` that says how to continue."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"could not write to {error.filename or folder}, which is not a folder: use another --out") from None
    except OSError as error:
        raise _write_error(error.filename or folder, error, folder / "checkpoints" / "last.pt") from None


@contextmanager
def locked(folder: Path, writes: bool = True) -> Iterator[None]:
    """Locks a run folder for this process: two processes that train in one folder would spoil each other's checkpoints.

    Args:
        writes: whether this is the process that writes, of those that train together.
    """
    try:
        import fcntl
    except ImportError:  # not on this operating system
        writes = False
    if not writes:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being trained by another process: wait until it ends, or stop it") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def _write_error(path: str | Path, error: OSError, checkpoint: Path) -> InputError:
    kept = "the previous checkpoint is intact" if checkpoint.exists() else "no checkpoint has been written yet"
    reason = error.strerror or str(error)
    return InputError(f"could not write {path} ({reason}); {kept}: free some disk space and continue with --resume")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
