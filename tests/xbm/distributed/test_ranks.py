"""Collectives between ranks and the bytes they count, errors when a rank is gone, and the gather of a global batch."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.worlds import on_ranks
from xbm.distributed import Ranks, gather, the_ranks
from xbm.distributed.ranks import communicate
from xbm.errors import InputError, LostPeerError


def exchanges() -> dict:
    ranks = Ranks()
    x = torch.tensor([1.0, -2.0]) * (ranks.rank + 1)
    return {
        "sum": ranks.sum(x, "sum"), "maximum": ranks.maximum(x, "maximum"), "untouched": x,
        "stack": ranks.stack(x, "stack"), "everyone": ranks.everyone(torch.arange(2 * ranks.rank), "everyone"),
        "scattered": ranks.scattered_sum(torch.arange(6.0).view(3, 2) + ranks.rank, "scattered"),
        "first": ranks.to_first(x), "agreed": ranks.agreed(f"räng {'x' * ranks.rank}"),
        "alone": Ranks.alone().sum(x, "alone"), "sent": dict(ranks.sent),
    }  # fmt: skip


def test_ranks_exchange_and_count():
    for rank, results in enumerate(on_ranks(3, exchanges)):
        assert results["sum"].tolist() == [6, -12] and results["maximum"].tolist() == [3, -2]
        assert results["untouched"].tolist() == results["alone"].tolist() == [rank + 1, -2 * (rank + 1)]
        assert results["stack"].tolist() == [[1, -2], [2, -4], [3, -6]]
        assert [part.tolist() for part in results["everyone"]] == [[], [0, 1], [0, 1, 2, 3]]
        assert results["scattered"].tolist() == [6.0 * rank + 3, 6.0 * rank + 6]
        assert (results["first"] is None) == (rank > 0) and results["agreed"] == "räng "
        assert results["sent"] == {
            "sum": 2 * 8 * 2 // 3, "maximum": 2 * 8 * 2 // 3, "stack": 16, "everyone: sizes": 16, "everyone": 64,
            "scattered": 24 * 2 // 3,
        }  # fmt: skip


def left_alone() -> list[str]:
    ranks = Ranks()
    ranks.wait()
    if ranks.rank == 1:
        os._exit(9)
    reasons = []
    for call in (
        lambda: ranks.sum(torch.ones(3), "sum"),
        lambda: ranks.stack(torch.ones(3), "stack"),
        lambda: ranks.agreed("x"),
    ):
        with pytest.raises(LostPeerError) as error:
            call()
        assert type(error.value.__cause__) is RuntimeError
        reasons.append(error.value.reason)
    return reasons


def test_a_rank_that_is_gone_is_a_lost_peer():
    reasons = on_ranks(2, left_alone, allow_deaths=True)[0]
    assert len(reasons) == 3 and all(reason and "\n" not in reason for reason in reasons)


def unsupported() -> str:
    Ranks().sum(torch.ones(3), "sum")
    with pytest.raises(RuntimeError) as error:
        communicate(dist.all_reduce, torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    return type(error.value).__name__


def test_a_call_that_gloo_refuses_is_no_lost_peer():
    assert on_ranks(2, unsupported) == ["RuntimeError"] * 2


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    ranks, x = the_ranks(), torch.ones(2, 3)
    assert ranks is the_ranks() and (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
    assert ranks.sum(x, "") is x and ranks.maximum(x, "") is x and ranks.everyone(x, "")[0] is x
    assert ranks.stack(x, "").shape == (1, 2, 3) and ranks.scattered_sum(x[None], "").shape == (2, 3)
    assert ranks.agreed("x") == "x" and not ranks.sent
    ranks.wait()


class Pending:
    """An exchange that has started and fails with an error, if any."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error:
            raise self.error


def started(error: Exception, *, async_op: bool) -> Pending:
    return Pending(error)


def not_started(error: Exception, *, async_op: bool) -> Pending:
    raise error


@pytest.mark.parametrize(
    ("collective", "error"),
    [
        (started, RuntimeError("reset\nby peer")),
        (started, dist.DistBackendError("x")),
        (not_started, dist.DistNetworkError("x")),
    ],
)
def test_failed_connections_are_lost_peers(collective, error):
    with pytest.raises(LostPeerError) as lost:
        communicate(collective, error)
    assert lost.value.__cause__ is error and lost.value.reason in ("reset by peer", "x")


@pytest.mark.parametrize(
    ("collective", "error"),
    [(not_started, RuntimeError("can't allocate memory")), (started, torch.OutOfMemoryError("x")), (started, KeyError("x"))],
)
def test_other_errors_pass_through(collective, error):
    with pytest.raises(type(error)) as passed:
        communicate(collective, error)
    assert passed.value is error


# ---------------------------------------------------------------- the global batch

SIZES = (3, 0, 2)


def batch(rank: int) -> tuple:
    m = SIZES[rank]
    rows = torch.full((m, 5), float(rank)) + torch.arange(m)[:, None] / 8
    return rows, torch.arange(m) + 10 * rank, torch.arange(m) + 100 * rank, torch.arange(m) % 2 == 0


def gathered() -> dict:
    ranks = Ranks()
    rows, labels, ids, mask = batch(ranks.rank)
    results = {"full": gather(ranks, rows, labels, ids, mask)}
    sent = ranks.sent.total()
    again = gather(ranks, rows.clone().requires_grad_().detach(), labels, ids, mask)  # other memory: sent again
    results["sent again"] = ranks.sent.total() - sent
    live = rows.clone().requires_grad_() * 1
    gather(ranks, live, labels, ids, mask)
    sent = ranks.sent.total()
    results["same"] = gather(ranks, live.detach(), labels, ids, mask)
    results["not sent"] = ranks.sent.total() - sent
    live.detach().add_(1)
    results["changed"] = gather(ranks, live, labels, ids, mask)
    results["half"] = gather(ranks, rows.bfloat16(), labels)
    assert torch.equal(again.embeddings, results["full"].embeddings)
    try:
        gather(ranks, rows, labels, ids if ranks.rank == 1 else None)
    except InputError as error:
        results["refused"] = str(error)
    return results


def test_every_rank_gets_the_global_batch_in_the_order_of_the_ranks():
    parts = [batch(rank) for rank in range(3)]
    rows, labels, ids, mask = (torch.cat(column) for column in zip(*parts))
    for rank, results in enumerate(on_ranks(3, gathered)):
        full = results["full"]
        for mine, theirs in zip(full[:4], (rows, labels, ids, mask)):
            assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
        assert full.sizes == SIZES and torch.equal(full.embeddings[full.mine], parts[rank][0])
        assert torch.equal(results["changed"].embeddings, rows + 1)
        assert torch.equal(results["half"].embeddings, rows.bfloat16()) and results["half"].ids is None
        assert "ids and mask on all or none" in results["refused"]
        # the batch padded to 3 rows of 5 floats and 3 integers, and 5 integers about it, to two others
        assert results["sent again"] == 2 * (3 * (5 * 4 + 3 * 8) + 5 * 8)
        assert results["not sent"] == 0 and torch.equal(results["same"].embeddings, rows)


def test_one_process_keeps_its_own():
    rows, labels, ids, mask = batch(0)
    own = gather(Ranks(), rows, labels, ids, mask)
    assert own.embeddings.data_ptr() == rows.data_ptr() and own.mine == slice(0, 3)
    with pytest.raises(AttributeError):
        gather(Ranks(), None, labels)
