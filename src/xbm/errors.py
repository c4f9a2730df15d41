"""The exceptions of the package. Each carries what a caller may need as attributes, so that nobody has to parse a message.

    XbmError                  everything that a user can act on; the command line prints it as one sentence
    ├── InputError            bad input: a value, a shape, a name, a file
    │   └── DamagedFileError  a file that cannot be read back
    ├── DivergedError         the loss of a run is no longer finite
    └── LostPeerError         another process of a distributed run is gone
        └── TerminatedError   this process was told to end, as torchrun does when another has ended

Errors of other packages, out of memory among them, pass through unchanged.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = ["DamagedFileError", "DivergedError", "InputError", "LostPeerError", "TerminatedError", "XbmError", "unknown"]

MOST_SHOWN = 16  # names in one message


class XbmError(Exception):
    """Base of all exceptions that a user can act on. The command line prints the message and exits with code 2.

    Example:
        >>> import xbm
        >>> try:
        ...     memory = xbm.CrossBatchMemory(size=0, dim=8)
        ... except XbmError as error:
        ...     print(error)
        size and dim must be positive integers, got 0 and 8
    """


class InputError(XbmError, ValueError, TypeError):
    """Bad input, described in one sentence that says what to do.

    It is a `ValueError` and a `TypeError`, so callers may catch whichever they expect.

    Example:
        >>> issubclass(InputError, XbmError), issubclass(InputError, ValueError), issubclass(InputError, TypeError)
        (True, True, True)
    """


class DamagedFileError(InputError):
    """A file that cannot be read back: cut short, damaged, or not what it claims to be.

    Attributes:
        path: the file.

    Example:
        >>> try:
        ...     raise DamagedFileError(Path("run/last.pt"), "run/last.pt is cut short: copy it again")
        ... except DamagedFileError as error:
        ...     print(error.path.name)
        last.pt
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class DivergedError(XbmError):
    """The loss of a run is not finite any more.

    Attributes:
        iteration: the first iteration whose loss was seen not to be finite.
        checkpoint: the last good checkpoint; None if none had been written.

    Example:
        >>> error = DivergedError(iteration=120, checkpoint=Path("run/last.pt"))
        >>> error.iteration, error.checkpoint.name
        (120, 'last.pt')
    """

    def __init__(self, iteration: int, checkpoint: Path | None = None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written yet"
        super().__init__(
            f"iteration {iteration}: the loss is not finite; {kept}: try a lower optim.lr, optim.precision=fp32, "
            "or memory.reduction=balanced, in a new run"
        )
        self.iteration, self.checkpoint = iteration, checkpoint


class LostPeerError(XbmError):
    """Another process of a distributed run has ended or cannot be reached.

    Attributes:
        reason: what is known about it.

    Example:
        >>> LostPeerError("connection closed").reason
        'connection closed'
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"another process of this run has ended or cannot be reached ({reason}): check its log, then restart all "
            "processes, with --resume if there is a checkpoint"
        )
        self.reason = reason


class TerminatedError(LostPeerError):
    """This process received SIGTERM, which is how torchrun ends the others when one process of a run has ended.

    Example:
        >>> issubclass(TerminatedError, LostPeerError)
        True
    """


def unknown(what: str, given: object, valid: Iterable[str]) -> InputError:
    """The error for a name that does not exist, with the nearest one that does.

    Example:
        >>> str(unknown("loss", "contrastiv", ["contrastive", "triplet"]))
        "unknown loss 'contrastiv': did you mean 'contrastive'? (contrastive, triplet)"
    """
    names = sorted(valid)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    shown = ", ".join(names if len(names) <= MOST_SHOWN else [*names[:MOST_SHOWN], "..."])
    hint = f"choose one of {shown}"
    if near:
        hint = f"did you mean {near[0]!r}?" + (f" ({shown})" if len(names) <= MOST_SHOWN else "")
    return InputError(f"unknown {what} {given!r}: {hint}")
