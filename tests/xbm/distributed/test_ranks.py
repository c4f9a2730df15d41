"""The exchanges between ranks, the bytes they count, and what is said when a rank is gone."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.worlds import on_ranks
from xbm.distributed import Ranks
from xbm.distributed.ranks import lost_touch_told, the_ranks
from xbm.errors import LostPeerError


def exchanges() -> dict:
    ranks = Ranks()
    x = torch.tensor([1.0, -2.0]) * (ranks.rank + 1)
    return {
        "sum": ranks.sum(x, "sum"), "maximum": ranks.maximum(x, "maximum"), "untouched": x,
        "stack": ranks.stack(x, "stack"), "everyone": ranks.everyone(torch.arange(2 * ranks.rank), "everyone"),
        "scattered": ranks.scattered_sum(torch.arange(6.0).view(3, 2) + ranks.rank, "scattered"),
        "first": ranks.to_first(x), "agreed": ranks.agreed(f"rank {ranks.rank}"), "sent": dict(ranks.sent),
    }  # fmt: skip


def test_ranks_exchange_and_count():
    for rank, found in enumerate(on_ranks(3, exchanges)):
        assert found["sum"].tolist() == [6, -12] and found["maximum"].tolist() == [3, -2]
        assert found["untouched"].tolist() == [rank + 1, -2 * (rank + 1)]
        assert found["stack"].tolist() == [[1, -2], [2, -4], [3, -6]]
        assert [part.tolist() for part in found["everyone"]] == [[], [0, 1], [0, 1, 2, 3]]
        assert found["scattered"].tolist() == [6.0 * rank + 3, 6.0 * rank + 6]
        assert (found["first"] is None) == (rank > 0) and found["agreed"] == "rank 0"
        assert found["sent"] == {
            "sum": 2 * 8 * 2 // 3, "maximum": 2 * 8 * 2 // 3, "stack": 16, "everyone: sizes": 16, "everyone": 64,
            "scattered": 24 * 2 // 3,
        }  # fmt: skip


def left_alone() -> str:
    ranks = Ranks()
    ranks.wait()
    if ranks.rank == 1:
        os._exit(9)
    try:
        ranks.sum(torch.ones(3), "sum")
    except LostPeerError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_is_gone_is_told_in_one_sentence():
    said = on_ranks(2, left_alone, allow_deaths=True)
    assert "another process of this run has ended" in said[0] and "\n" not in said[0]


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    ranks, x = the_ranks(), torch.ones(2, 3)
    assert ranks is the_ranks() and (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
    assert ranks.sum(x, "") is x and ranks.maximum(x, "") is x and ranks.everyone(x, "")[0] is x
    assert ranks.stack(x, "").shape == (1, 2, 3) and ranks.scattered_sum(x[None], "").shape == (2, 3)
    assert ranks.agreed("x") == "x" and not ranks.sent
    ranks.wait()


def test_only_failed_exchanges_are_retold():
    with pytest.raises(KeyError), lost_touch_told():
        raise KeyError("mine")
    with pytest.raises(LostPeerError, match="peer gone"), lost_touch_told():
        raise RuntimeError("peer gone\nat line 3")
    with pytest.raises(torch.OutOfMemoryError), lost_touch_told():
        raise torch.OutOfMemoryError("not a lost peer")
