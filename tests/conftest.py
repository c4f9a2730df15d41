"""Shared by all tests: the same random numbers, pictures to train on, and a finished run."""

from pathlib import Path

import pytest
import torch

from tiny import draw_photos, tiny_config


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


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


@pytest.fixture(scope="session")
def searchable(own_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tells images apart, as `finished` hardly does; nobody may change it either."""
    from xbm.train.loop import train

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("searchable") / "run"
    longer = {"loss__reduction": "mean", "memory__ratio": 0.0, "optim__iterations": 100, "optim__decay_at": (80,)}
    train(tiny_config(own_photos, **longer), folder, quiet=True)
    return folder
