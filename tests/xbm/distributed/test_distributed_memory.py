"""Memories of several ranks: replicated, and sharded with its state under different numbers of ranks."""

import pytest
import torch
import torch.nn.functional as F

from tests.worlds import on_ranks
from xbm import CrossBatchMemory, InputError
from xbm.distributed import ReplicatedMemory, ShardedMemory


def batches(count: int, start: int = 0):
    for k in range(start, start + count):
        draw = torch.Generator().manual_seed(k)
        ids = torch.randperm(11, generator=draw)[:4]
        yield F.normalize(torch.randn(4, 3, generator=draw)), ids % 3, ids


def alone(update: str, count: int) -> CrossBatchMemory:
    memory = CrossBatchMemory(11, 3, update)
    for v, labels, ids in batches(count):
        memory.enqueue(v, labels, ids)
    return memory


def moved(update: str, state: dict) -> dict:
    """Goes on from another number of ranks' state for two batches."""
    memory = ShardedMemory(11, 3, update)
    memory.load_state_dict(state)
    R, rank = memory.ranks.world, memory.ranks.rank
    for v, labels, ids in batches(2, start=5):
        memory.enqueue(*(x[rank * 4 // R : (rank + 1) * 4 // R] for x in (v, labels, ids)))
    return {
        "state": memory.state_dict(),
        "ids": memory.ids,
        "ages": memory.ages,
        "len": len(memory),
    }


@pytest.mark.parametrize("update", ["queue", "moving_average"])
def test_a_state_moves_between_numbers_of_ranks(update):
    expected = alone(update, 7).state_dict()
    results = on_ranks(3, moved, update, alone(update, 5).state_dict())
    for name, value in expected.items():
        assert torch.equal(results[0]["state"][name], value), name
    assert results[1]["state"] == {}
    for rank, each in enumerate(results):
        assert each["len"] == int(expected["count"])
        if update != "queue":
            filled = expected["stamps"][rank::3] >= 0
            assert torch.equal(each["ids"], torch.arange(rank, 11, 3)[filled])
        assert sorted(each["ages"].tolist()) == sorted(
            (expected["clock"] - s).item() for s in expected["stamps"][rank::3] if s >= 0
        )
    again = moved(update, {**alone(update, 5).state_dict()})  # and back to one process
    assert all(torch.equal(again["state"][name], value) for name, value in expected.items())


def test_what_does_not_fit_is_refused():
    memory = ShardedMemory(4, 2)
    with pytest.raises(InputError, match=r"\(4, 2\)"):
        memory.load_state_dict(CrossBatchMemory(5, 2).state_dict())
    with pytest.raises(InputError, match="length 2"):
        memory.enqueue(2 * torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert len(memory) == 0 and not memory.is_full and memory


def test_a_model_around_it_cannot_save_it():
    with pytest.raises(InputError, match="outside the model"):
        torch.nn.Sequential(torch.nn.Linear(2, 2), ShardedMemory(4, 2)).state_dict()


def test_bad_rows_that_a_gpu_could_not_refuse_are_reported():
    memory = ShardedMemory(4, 2)
    memory.check()
    memory.unsound += 2
    with pytest.raises(InputError, match="2 rows were not written"):
        memory.check()


def test_it_is_filled_and_cleared_like_any_memory():
    memory = ShardedMemory(4, 3)
    memory.fill(torch.nn.Identity(), batches(3))
    assert memory.is_full
    memory.clear()
    assert len(memory) == 0 and memory.embeddings.shape == (0, 3)


def test_a_replicated_memory_of_one_process_is_a_plain_memory():
    plain, ours = CrossBatchMemory(7, 3), ReplicatedMemory(7, 3)
    for _ in range(4):
        v, labels, ids = F.normalize(torch.randn(3, 3)), torch.arange(3), torch.randint(0, 9, (3,))
        plain.enqueue(v, labels, ids)
        ours.enqueue(v, labels, ids)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in plain.state_dict().items())
    ours.load_state_dict(plain.state_dict())


def test_a_replicated_step_without_gradients_leaves_the_rows_alone():
    memory = ReplicatedMemory(3, 2, "backprop")
    memory.enqueue(torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 2]))
    before = memory.rows.detach().clone()
    memory.step()
    assert torch.equal(memory.rows, before)
