"""Files that are whole or not there, whenever the run is killed; and a full disk told in one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xbm.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; afterwards, synced, it takes the place of `path`, wholly or not at all.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as beside:
        ...     _ = beside.write_text("all of it")
        >>> target.read_text()
        'all of it'
    """
    beside = path.with_name(f"{path.stem}.part{path.suffix}")  # numpy insists on the suffix
    try:
        yield beside
        _sync(beside)
        os.replace(beside, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


@contextmanager
def disk_trouble_told(folder: Path) -> Iterator[None]:
    """Turns what the operating system says about a run folder (full, not writable, gone) into an `InputError`."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"could not write to {error.filename or folder}, which is no folder: give another --out") from None
    except OSError as error:
        raise unwritable(error.filename or folder, error.strerror or str(error), folder / "checkpoints" / "last.pt") from None


@contextmanager
def held(folder: Path, first: bool = True) -> Iterator[None]:
    """A run folder for this process alone, as long as it lives: two that train in one would spoil each other's checkpoints.

    Args:
        first: whether this is the process that writes, of those that train together.
    """
    try:
        import fcntl
    except ImportError:  # not on this operating system
        first = False
    if not first:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being trained by another process: wait for it to end, or stop it first") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def unwritable(where: str | Path, reason: str, last: Path) -> InputError:
    """The error for a file that could not be written; `last` is the checkpoint that a resume would start from."""
    kept = "the checkpoint before it is unharmed" if last.exists() else "no checkpoint had been written yet"
    return InputError(f"could not write {where} ({reason}); {kept}: free some space and go on with --resume")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
