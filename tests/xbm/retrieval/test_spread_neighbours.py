"""Neighbours in a gallery on many ranks, played by one: those in a whole gallery. For several see test_spread.py."""

import torch

from xbm.distributed import Ranks
from xbm.retrieval import nearest
from xbm.retrieval.spread_neighbours import spread_nearest


def test_one_rank_finds_what_a_single_process_finds():
    torch.manual_seed(1)
    rows, searched, ids = torch.randint(-1, 2, (70, 4)).float(), torch.randint(-1, 2, (90, 4)).float(), torch.arange(90) % 20
    for query_ids, gallery_ids in ((None, None), (ids[:70], ids)):
        alone = nearest(rows, searched, 100, query_ids, gallery_ids)
        spread = spread_nearest(Ranks(), rows, searched, 100, query_ids, gallery_ids)
        assert torch.equal(alone[1], spread[1]) and torch.equal(alone[0], spread[0])
