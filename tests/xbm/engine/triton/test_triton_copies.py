"""The search for newest copies against the memory's own."""

import pytest
import torch

from xbm.engine.triton import copies, newest_copies
from xbm.engine.triton.plan import PLACES
from xbm.memory import newest_copies as plain


@pytest.mark.parametrize(("m", "M"), [(5, 3), (1, 1), (17, 300)])
def test_the_newest_copy_is_the_one_written_last(m, M):
    for pointer in (0, M // 3, M - 1):
        row_ids = torch.randint(-1, 9, (M,))
        stamps = torch.where(torch.rand(M) < 0.2, -1, 1)
        ids = torch.randint(0, 12, (m,))
        given = (ids, row_ids, stamps, torch.tensor(pointer))
        assert newest_copies(*given).tolist() == plain(*given).tolist()


def place(i):
    """Where a number falls in the table, as the kernels have it."""
    mixed = (i * -1640531527) % (1 << 32)
    mixed -= (mixed >= 1 << 31) << 32
    return (mixed >> 12) & (PLACES - 1)


def test_ids_that_fall_on_the_same_place_are_told_apart(monkeypatch):
    twin = next(i for i in range(1, 1 << 20) if place(i) == place(7) and i != 7)
    row_ids = torch.tensor([7, twin, 3, 7, twin, twin, 5])
    given = (torch.tensor([twin, 7, 7, 4, 3]), row_ids, torch.ones(7, dtype=torch.int64), torch.tensor(5))
    assert newest_copies(*given).tolist() == plain(*given).tolist() == [4, 3, 3, -1, 2]
    monkeypatch.setattr(copies, "MOST", 2)  # more anchors than the table can number
    assert newest_copies(*given).tolist() == [4, 3, 3, -1, 2]
