"""Entry point of the command line: bad input ends in one sentence and exit code 2, never in a traceback."""

import errno
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from xbm_app.progress import printable

PACKAGES = [Path(__file__).parents[1] / name for name in ("xbm", "xbm_app")]  # whose warnings are printed as one sentence
REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM), "free some disk space or check permissions"
    ),
    errno.EIO: "check the disk, or the connection to it",
    # a folder instead of a file, or vice versa; a name that is too long, or leads in circles
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP), "use another path"
    ),
}


def explain(error: Exception) -> str | None:
    """The sentence for an error that the user can fix; None for a defect."""
    from xbm.errors import XbmError

    if isinstance(error, XbmError):
        return str(error)
    if isinstance(error, OSError) and error.errno in REMEDIES:
        return f"{error.filename or 'the disk'} cannot be read or written ({error.strerror}): {REMEDIES[error.errno]}"
    if _is_of_torchvision(error):
        return "torch and torchvision do not fit each other: install both anew, pip install --upgrade torch torchvision"
    torch = sys.modules.get("torch")  # without torch there are no errors of torch
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if on_gpu or isinstance(error, MemoryError):
        where = "GPU" if on_gpu else "machine"
        return f"the {where} is out of memory: reduce batch.size, memory.ratio or model.dim, or set memory.dtype=bfloat16"
    return None


def _is_of_torchvision(error: Exception) -> bool:
    """Whether importing torchvision failed, as it does beside a torch that it was not built for."""
    frames = traceback.walk_tb(error.__traceback__)
    inside = any(Path(frame.f_code.co_filename).parent.name == "torchvision" for frame, _ in frames)
    return inside and "torchvision" not in sys.modules


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning of this project as one sentence, without its place in the code."""
    if any(Path(filename).is_relative_to(package) for package in PACKAGES):
        print(f"warning: {printable(str(message))}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def load_app() -> Callable[[], None]:
    from xbm_app.cli import app

    return app


def main(load: Callable[[], Callable[[], None]] = load_app) -> None:
    """Runs the command line that `load` imports (default: that of `xbm`)."""
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
        if (sentence := explain(error)) is None:
            raise
        print(f"error: {printable(sentence)}", file=sys.stderr)
        sys.exit(2)
