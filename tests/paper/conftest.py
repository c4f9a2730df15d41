"""Shared by the tests of the paper's experiments."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paper.experiments import EXPERIMENTS
from paper.page import Block
from paper.record import Records
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from tests.tiny import draw_photos


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files are written here; that they are synced is tested elsewhere."""
    monkeypatch.setattr("xbm_app.files._sync", lambda path: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of little pictures."""
    torch.set_num_threads(1)
    return draw_photos(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[[str], list[Block]]:
    """What an experiment shows of made-up runs on Cars."""

    def draw(name: str) -> list[Block]:
        records = Records(tmp_path)
        carry_out([EXPERIMENTS[name]], [CARS], 1, records)
        return EXPERIMENTS[name].draw("cars", [Study(EXPERIMENTS[name], CARS, records)])

    return draw
