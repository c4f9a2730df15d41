"""Shared by the tests of serving: two indexes of the same photographs by two runs, and a server that shows them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.xbm_app.serve.serving import running
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.serve import uploads
from xbm_app.serve.uploads import Decoders


@pytest.fixture(scope="session")
def searchers(searchable: Path, finished: Path, own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Searcher]:
    folder = tmp_path_factory.mktemp("served")
    for name, run in (("good", searchable), ("poor", finished)):
        update(run, own_photos, folder / name, pytest.fail, quiet=True)
    return [Searcher(folder / "good"), Searcher(folder / "poor")]


@pytest.fixture(scope="session")
def decoders() -> Iterator[Decoders]:
    with Decoders(1) as decoders, pytest.MonkeyPatch.context() as patient:
        for limit in ("MOST_SECONDS", "MOST_WAITING"):
            patient.setattr(uploads, limit, 30)  # a machine that runs tests may be busy
        yield decoders


@pytest.fixture(scope="session")
def comparing(searchers: list[Searcher], decoders: Decoders) -> Iterator[str]:
    yield from running(searchers, decoders)


@pytest.fixture(scope="session")
def single(searchers: list[Searcher], decoders: Decoders) -> Iterator[str]:
    yield from running(searchers[:1], decoders)
