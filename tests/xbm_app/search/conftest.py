"""Shared by the tests of searching: photographs of one's own, and an index of them that nobody may change."""

import shutil
from pathlib import Path

import pytest

from xbm_app.search.update import update


@pytest.fixture
def photos(own_photos: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(own_photos, tmp_path / "photos"))


@pytest.fixture(scope="session")
def made_index(searchable: Path, own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "index"
    update(searchable, own_photos, out, pytest.fail, quiet=True)
    return out
