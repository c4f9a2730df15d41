"""Runs the command line: bad input ends in one sentence and exit code 2, never in a traceback."""

import errno
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

PACKAGES = [Path(__file__).parents[1] / name for name in ("xbm", "xbm_app")]  # whose warnings are shown as one sentence
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # full, or not for this user to write to
PATH = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)  # a folder in place of a file, or the other way round


def told(error: Exception) -> str | None:
    """What to say of an error that the user can mend; None for one that is a defect."""
    from xbm.errors import XbmError

    if isinstance(error, XbmError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*DISK, *PATH):
        what, mend = error.filename or "the disk", "make room" if error.errno in DISK else "give another path"
        return f"{what} cannot be written or read ({error.strerror}): {mend}"
    torch = sys.modules.get("torch")  # an error of torch's cannot come from where torch was not imported
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if on_gpu or isinstance(error, MemoryError):
        where = "GPU" if on_gpu else "machine"
        mend = "a smaller batch.size, memory.ratio or model.dim takes less, memory.dtype=bfloat16 halves the memory's rows"
        return f"the {where} has not enough memory for this: {mend}"
    return None


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one sentence, without the place in the code; those of other packages are theirs."""
    if any(Path(filename).is_relative_to(package) for package in PACKAGES):
        print(f"warning: {message}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def load_app() -> Callable[[], None]:
    from xbm_app.cli import app

    return app


def main(load: Callable[[], Callable[[], None]] = load_app) -> None:
    """Runs the command line that `load` imports; that of `xbm` unless another is given."""
    warnings.showwarning = warn
    try:
        app = load()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("the command line needs a few more packages: pip install 'xbm[train]'")

    try:
        app()
    except Exception as error:
        if (sentence := told(error)) is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
