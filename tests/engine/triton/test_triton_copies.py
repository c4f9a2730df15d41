"""The search for newest copies against the memory's own."""

import pytest
import torch

from xbm.engine.triton import newest_copies, plan
from xbm.memory import newest_copies as plain


@pytest.mark.parametrize(("m", "M"), [(5, 3), (1, 1), (17, 300)])
def test_the_newest_copy_is_the_one_written_last(m, M, monkeypatch):
    monkeypatch.setattr(plan, "resources", lambda device: (4, 0))  # eight parts
    for pointer in (0, M // 3, M - 1):
        row_ids = torch.randint(-1, 9, (M,))
        stamps = torch.where(torch.rand(M) < 0.2, -1, 1)
        ids = torch.randint(0, 12, (m,))
        given = (ids, row_ids, stamps, torch.tensor(pointer))
        assert newest_copies(*given).tolist() == plain(*given).tolist()
