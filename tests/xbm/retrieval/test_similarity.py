import random

import pytest
import torch

from xbm.retrieval.similarity import find_copies


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (2, 1), (50, 1), (80, 2), (90, 5), (60, 6), (500, 700)])
def test_copies_equal_a_search_through_all_pairs(count, dim):
    rng = random.Random(count)
    rows = [[rng.choice([-1.0, 0.5, 1.0]) for _ in range(dim)] for _ in range(count)]
    rows[count // 2 :: 7] = rows[: len(rows[count // 2 :: 7])]
    expected = {i: rows.index(row) for i, row in enumerate(rows) if rows.index(row) < i}
    again, first = find_copies(torch.tensor(rows))
    assert dict(zip(again.tolist(), first.tolist(), strict=True)) == expected


def test_rows_that_only_share_a_hash_are_no_copies(monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.zeros(args[2], dtype=torch.int64))
    again, first = find_copies(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]]))
    assert (again.tolist(), first.tolist()) == ([3], [0])
