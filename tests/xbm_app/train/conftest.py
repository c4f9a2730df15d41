"""Shared by the tests of training: pictures to train on."""

from pathlib import Path

import pytest

from tests.tiny import draw_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of six images; nobody may change them."""
    return draw_photos(tmp_path_factory.mktemp("pictures") / "photos")
