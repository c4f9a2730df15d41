import pytest
import torch

from tests.same import same
from tests.worlds import on_ranks
from tests.xbm.integrations import small
from xbm import CrossBatchMemory, InputError
from xbm.distributed import Ranks, ReplicatedMemory, ShardedMemory
from xbm.integrations import States


class Counter:
    """Not a module: anything with the two methods."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "nested": [torch.tensor(self.value), ("a", None)]}

    def load_state_dict(self, state):
        self.value = state["value"]


def filled(seed=0, **options):
    torch.manual_seed(seed)
    memory = CrossBatchMemory(7, 3, **options)
    memory.enqueue(torch.nn.functional.normalize(torch.randn(9, 3)), torch.arange(9), torch.arange(9) % 7)
    return memory


@pytest.mark.parametrize("update", ["queue", "moving_average", "backprop"])
def test_everything_comes_back_through_a_file(update, tmp_path):
    memory, counter = filled(update=update), Counter(3)
    torch.save(States({"memory": memory, "counter": counter}).state_dict(), tmp_path / "states.pt")
    other, again = CrossBatchMemory(7, 3, update), Counter()
    States({"memory": other, "counter": again}).load_state_dict(torch.load(tmp_path / "states.pt", weights_only=True))
    assert same(memory.state_dict(), other.state_dict()) == [] and again.value == 3
    assert other.rows.requires_grad is (update == "backprop") and other.rows.is_leaf


def test_modules_are_moved_and_others_are_left_alone():
    memory, counter = filled(), Counter(3)
    States({"memory": memory, "counter": counter}).to("meta")
    assert memory.rows.device.type == "meta" and counter.value == 3


@pytest.mark.parametrize(
    ("objects", "message"),
    [({}, "nothing to save: pass a memory, such as memory=memory"), ({"memory": [1]}, "memory must have state_dict.*got list")],
)
def test_what_cannot_be_saved_is_refused(objects, message):
    with pytest.raises(InputError, match=message):
        States(objects)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"other": [{}]}, "the checkpoint holds no state of 'memory'"),
        (
            {"memory": [{}, {}]},
            "the state of memory on 2 processes, and this run has 1: resume with 2, or use ReplicatedMemory",
        ),
        ({"memory": [CrossBatchMemory(8, 3).state_dict()]}, "the state of memory in the checkpoint does not fit it"),
        ({"memory": [{"rows": torch.zeros(7, 3)}]}, "the state of memory in the checkpoint does not fit it"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(saved, message):
    with pytest.raises(InputError, match=message) as caught:
        States({"memory": filled()}).load_state_dict(saved)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ several processes


def built():
    ranks = Ranks()
    return {
        "own": CrossBatchMemory(small.SIZE, 3),
        "replicated": ReplicatedMemory(small.SIZE, 3, ranks=ranks),
        "sharded": ShardedMemory(small.SIZE, 3, ranks=ranks),
    }


def content(memories):
    plain = {name: memory.state_dict() for name, memory in memories.items() if name != "sharded"}
    buffers = dict(memories["sharded"].named_buffers())
    del buffers["shard.latest"]  # unused: that of the whole memory counts
    return {**plain, "sharded": {name: buffer.clone() for name, buffer in buffers.items()}}


def there_and_back(path):
    """Each rank writes rows of its own; rank 0 saves; every rank loads into new memories."""
    rank = Ranks().rank
    torch.manual_seed(rank)
    memories = built()
    for memory in memories.values():
        memory.enqueue(torch.nn.functional.normalize(torch.randn(5, 3)), torch.arange(5), 100 * rank + torch.arange(5))
    state = States(memories).state_dict()
    assert bool(state) is (rank == 0)
    if rank == 0:
        torch.save(state, path)
    torch.distributed.barrier()
    others = built()
    States(others).load_state_dict(torch.load(path, weights_only=True))
    return content(memories), content(others)


def on_another_number(path):
    memories = built()
    saved = torch.load(path, weights_only=True)
    shared = {name: memory for name, memory in memories.items() if name != "own"}
    States(shared).load_state_dict(saved)
    with pytest.raises(InputError, match="the state of own on 2 processes, and this run has 3: resume with 2"):
        States({"own": memories["own"]}).load_state_dict(saved)
    return len(memories["sharded"]), memories["replicated"].state_dict()


def test_each_process_gets_its_own_memory_back(tmp_path):
    results = on_ranks(2, there_and_back, tmp_path / "states.pt")
    for before, after in results:
        assert same(before, after) == []
    (one, _), (other, _) = results
    assert not torch.equal(one["own"]["row_ids"], other["own"]["row_ids"])
    assert torch.equal(one["replicated"]["row_ids"], other["replicated"]["row_ids"])
    for length, replicated in on_ranks(3, on_another_number, tmp_path / "states.pt"):
        assert length == 10 and same(replicated, one["replicated"]) == []
