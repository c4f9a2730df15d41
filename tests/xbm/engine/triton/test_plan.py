"""How a step is cut up: every row once, programs and memory within bounds."""

import pytest
import torch

from xbm.engine.triton import plan

PROCESSORS, SHARED = 132, 227 * 1024


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(plan, "resources", lambda device: (PROCESSORS, SHARED))


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("m", [1, 64, 65, 700, 4096])
@pytest.mark.parametrize("M", [0, 1, 63, 64, 59_551, 1_000_000, 50_000_000])
@pytest.mark.parametrize("D", [16, 100, 129, 512, 2048])
def test_every_row_has_one_program_and_the_grid_fills_the_device(D, M, m, half, h200):
    p = plan.plan(m, M, D, half, False, torch.device("cpu"))
    for parts, size in ((p.splits, p.per), (p.scans, p.scanned)):
        assert parts * size >= M and (parts - 1) * size < max(M, 1) and size % 16 == 0 and 1 <= parts < 65536
    programs = p.blocks * p.splits
    assert programs <= max(PROCESSORS * p.tiles.per_processor, p.blocks)
    if M >= 59_551 and p.blocks <= PROCESSORS:
        assert programs > 0.6 * PROCESSORS
    assert 1 <= p.capacity <= max(M, 1)


def test_the_memory_of_a_step_is_bounded(h200):
    """One partial gradient a multiprocessor and the lists: 24 MB at the paper's size, whatever the bank's."""
    for M in (59_551, 1_000_000, 10_000_000):
        p = plan.plan(64, M, 512, True, False, torch.device("cpu"))
        partial, lists, scans = p.splits * 64 * (512 + 6) * 4, 64 * p.capacity * 12, 64 * p.scans * 4 + 2 * plan.PLACES
        assert partial + lists + scans <= 24e6


def test_small_problems_list_everything():
    assert plan.capacity(64, 7000) == 7000 and plan.capacity(64, 59_551) == 7168 and plan.capacity(4096, 4096) == 512


def test_tiles_fit_smaller_devices_and_rows_of_any_alignment():
    assert plan.tiles(512, True, True, SHARED).narrow and not plan.tiles(512, True, True, 99 * 1024).narrow
    assert not plan.tiles(129, True, True, SHARED).narrow and plan.tiles(129, True, True, SHARED).columns == 128
    assert not plan.tiles(2048, True, True, SHARED).narrow
