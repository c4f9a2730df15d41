"""Shared by all tests: the same random numbers, one thread, pictures to train on, finished runs, and a browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Bit for bit needs the same number of threads everywhere, and tiny nets are fastest with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH: install one to test the page in a browser")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as session:
        opened = session.chromium.launch(executable_path=found[0])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def own_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import draw_photos  # it needs the applications' packages, which the library's tests do without

    return draw_photos(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(scope="session")
def finished(own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody may change."""
    from tests.tiny import tiny_config
    from xbm_app.train.loop import train

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_config(own_photos), folder, quiet=True)
    return folder


@pytest.fixture(scope="session")
def searchable(own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tells images apart, as `finished` hardly does; nobody may change it either."""
    from tests.tiny import tiny_config
    from xbm_app.train.loop import train

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("searchable") / "run"
    longer = {"loss__reduction": "mean", "memory__ratio": 0.0, "optim__iterations": 100, "optim__decay_at": (80,)}
    train(tiny_config(own_photos, **longer), folder, quiet=True)
    return folder
