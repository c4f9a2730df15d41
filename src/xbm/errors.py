"""The one exception for everything a user can mend, and the nearest-name hint that goes into it."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["InputError", "unknown"]

MOST_SHOWN = 16  # names in one message


class InputError(ValueError, TypeError):
    """Bad input, told in one sentence that says what to do. The command line turns it into exit code 2.

    It is a `ValueError` and a `TypeError`, so callers may catch whichever they expect.
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
