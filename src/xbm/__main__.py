"""`xbm ...` and `python -m xbm ...`: forwards to the command line of the applications."""

import sys


def main() -> None:
    try:
        from xbm_app.main import main as run

        run()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
