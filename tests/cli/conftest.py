"""Shared by the tests of the command line: pictures to train on and a finished run."""

from pathlib import Path

import pytest
import torch

from tiny import draw_photos, tiny_config


@pytest.fixture(scope="session")
def own_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_photos(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(scope="session")
def finished(own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody may change."""
    from xbm.train.loop import train

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_config(own_photos), folder, quiet=True)
    return folder
