"""Shared by the tests of serving: two indexes of the same photographs by two runs, and a server that shows them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from xbm.search.searcher import Searcher
from xbm.search.update import update
from xbm.serve.app import create_app
from xbm.serve.run import access_to, listen


@pytest.fixture(scope="session")
def searchers(searchable: Path, finished: Path, own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Searcher]:
    folder = tmp_path_factory.mktemp("served")
    for name, run in (("good", searchable), ("poor", finished)):
        update(run, own_photos, folder / name, pytest.fail, quiet=True)
    return [Searcher(folder / "good"), Searcher(folder / "poor")]


def running(searchers: list[Searcher]) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    with listen("127.0.0.1", 0) as opened:
        app = create_app(searchers, access_to("127.0.0.1", [], None))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{opened.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def comparing(searchers: list[Searcher]) -> Iterator[str]:
    yield from running(searchers)


@pytest.fixture(scope="session")
def single(searchers: list[Searcher]) -> Iterator[str]:
    yield from running(searchers[:1])
