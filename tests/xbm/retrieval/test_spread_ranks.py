"""Counting for a gallery on many ranks, played by one: the ranks of a whole gallery. For several see test_spread.py."""

import pytest
import torch

from xbm.distributed import Ranks
from xbm.retrieval import ranks
from xbm.retrieval.inputs import read_sets
from xbm.retrieval.ranks import rank, ranks_of
from xbm.retrieval.spread import read_spread
from xbm.retrieval.spread_ranks import spread_ranks


@pytest.mark.parametrize("sort_above", [ranks.SORT_ABOVE, 4, 0])
def test_one_rank_finds_what_a_single_process_finds(monkeypatch, sort_above):
    monkeypatch.setattr(ranks, "SORT_ABOVE", sort_above)
    torch.manual_seed(1)
    rows, labels = torch.randint(-1, 2, (150, 4)).float(), torch.randint(0, 30, (150,))
    alone, spread = rank(read_sets(rows, labels), ranks_of), rank(read_spread(Ranks(), rows, labels), spread_ranks)
    for name, value in vars(alone).items():
        assert torch.equal(getattr(spread, name), value), name
