"""`make bench`: every table that runs on a CPU."""

from benchmarks import feeds, losses, retrieval


def main() -> None:
    losses.main()
    retrieval.main()
    feeds.main()


if __name__ == "__main__":
    main()
