"""Prints every table that runs on a CPU (`make bench`)."""

from benchmarks import feeds, losses, retrieval


def main() -> None:
    losses.main()
    retrieval.main()
    feeds.main()


if __name__ == "__main__":
    main()
