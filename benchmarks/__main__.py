"""Prints every table that runs on a CPU (`make bench`)."""

from benchmarks import cached_backward, feeds, losses, references, retrieval


def main() -> None:
    losses.main()
    references.main()
    retrieval.main()
    feeds.main()
    cached_backward.main()


if __name__ == "__main__":
    main()
