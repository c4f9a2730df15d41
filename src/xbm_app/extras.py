"""Optional packages that only some commands need."""

from importlib.util import find_spec

from xbm.errors import InputError


def require(extra: str, *packages: str) -> None:
    """Raises `InputError` if one of the `packages` of an extra is not installed.

    Example:
        >>> require("serve", "json")
        >>> require("serve", "faiss_that_nobody_has")
        Traceback (most recent call last):
        xbm.errors.InputError: this needs the package faiss_that_nobody_has: pip install 'xbm[serve]'
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        plural = "package" if len(missing) == 1 else "packages"
        raise InputError(f"this needs the {plural} {', '.join(missing)}: pip install 'xbm[{extra}]'")
