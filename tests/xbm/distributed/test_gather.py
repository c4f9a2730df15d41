"""Gathering in the order of the ranks: uneven, empty, masked, half precision; and once only."""

import pytest
import torch

from tests.worlds import on_ranks
from xbm.distributed import Ranks, gather
from xbm.errors import InputError

SIZES = (3, 0, 2)


def batch(rank: int) -> tuple:
    m = SIZES[rank]
    rows = torch.full((m, 5), float(rank)) + torch.arange(m)[:, None] / 8
    return rows, torch.arange(m) + 10 * rank, torch.arange(m) + 100 * rank, torch.arange(m) % 2 == 0


def gathered() -> dict:
    ranks = Ranks()
    rows, labels, ids, mask = batch(ranks.rank)
    found = {"full": gather(ranks, rows, labels, ids, mask)}
    sent = ranks.sent.total()
    again = gather(ranks, rows.clone().requires_grad_().detach(), labels, ids, mask)  # other memory: sent again
    found["sent again"] = ranks.sent.total() - sent
    live = rows.clone().requires_grad_() * 1
    gather(ranks, live, labels, ids, mask)
    sent = ranks.sent.total()
    found["same"] = gather(ranks, live.detach(), labels, ids, mask)
    found["not sent"] = ranks.sent.total() - sent
    live.detach().add_(1)
    found["changed"] = gather(ranks, live, labels, ids, mask)
    found["half"] = gather(ranks, rows.bfloat16(), labels)
    assert torch.equal(again.embeddings, found["full"].embeddings)
    try:
        gather(ranks, rows, labels, ids if ranks.rank == 1 else None)
    except InputError as error:
        found["refused"] = str(error)
    return found


def test_every_rank_gets_the_global_batch_in_the_order_of_the_ranks():
    parts = [batch(rank) for rank in range(3)]
    rows, labels, ids, mask = (torch.cat(column) for column in zip(*parts))
    for rank, found in enumerate(on_ranks(3, gathered)):
        full = found["full"]
        for mine, theirs in zip(full[:4], (rows, labels, ids, mask)):
            assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
        assert full.sizes == SIZES and torch.equal(full.embeddings[full.mine], parts[rank][0])
        assert torch.equal(found["changed"].embeddings, rows + 1)
        assert torch.equal(found["half"].embeddings, rows.bfloat16()) and found["half"].ids is None
        assert "ids and mask on all or none" in found["refused"]
        # the batch padded to 3 rows of 5 floats and 3 integers, and 5 integers about it, to two others
        assert found["sent again"] == 2 * (3 * (5 * 4 + 3 * 8) + 5 * 8)
        assert found["not sent"] == 0 and torch.equal(found["same"].embeddings, rows)


def test_one_process_keeps_its_own():
    rows, labels, ids, mask = batch(0)
    found = gather(Ranks(), rows, labels, ids, mask)
    assert found.embeddings.data_ptr() == rows.data_ptr() and found.mine == slice(0, 3)
    with pytest.raises(AttributeError):
        gather(Ranks(), None, labels)
