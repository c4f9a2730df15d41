"""`xbm ...` and `python -m xbm ...`: runs the command line; bad input ends in one sentence and exit code 2."""

import errno
import sys

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # full, or not for this user to write to


def main() -> None:
    try:
        from xbm.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("the command line needs a few more packages: pip install 'xbm[train]'")
    from xbm.errors import InputError

    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"error: {error.filename or 'the disk'} cannot be written or read ({error.strerror}): make room", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
