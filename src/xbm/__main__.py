"""`xbm ...` and `python -m xbm ...`: forwards to the command line of the applications."""


def main() -> None:
    from xbm_app.main import main as run

    run()


if __name__ == "__main__":
    main()
