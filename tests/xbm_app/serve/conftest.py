"""Shared by the tests of serving: two indexes of the same photographs by two runs, and a server that shows them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.xbm_app.serve.serving import running
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update


@pytest.fixture(scope="session")
def searchers(searchable: Path, finished: Path, own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Searcher]:
    folder = tmp_path_factory.mktemp("served")
    for name, run in (("good", searchable), ("poor", finished)):
        update(run, own_photos, folder / name, pytest.fail, quiet=True)
    return [Searcher(folder / "good"), Searcher(folder / "poor")]


@pytest.fixture(scope="session")
def comparing(searchers: list[Searcher]) -> Iterator[str]:
    yield from running(searchers)


@pytest.fixture(scope="session")
def single(searchers: list[Searcher]) -> Iterator[str]:
    yield from running(searchers[:1])
