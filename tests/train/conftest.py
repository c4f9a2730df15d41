"""Shared by the tests of training: pictures to train on, one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny import draw_photos


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Bit for bit needs the same number of threads everywhere, and tiny runs are fastest with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of six images; nobody may change them."""
    return draw_photos(tmp_path_factory.mktemp("pictures") / "photos")
