"""A memory on every rank: what DistributedDataParallel would do to it, and that it is the single process's when alone."""

import torch
import torch.nn.functional as F

from xbm import CrossBatchMemory
from xbm.distributed import ReplicatedMemory


def test_alone_it_is_a_plain_memory():
    plain, ours = CrossBatchMemory(7, 3), ReplicatedMemory(7, 3)
    for _ in range(4):
        v, labels, ids = F.normalize(torch.randn(3, 3)), torch.arange(3), torch.randint(0, 9, (3,))
        plain.enqueue(v, labels, ids)
        ours.enqueue(v, labels, ids)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in plain.state_dict().items())
    ours.load_state_dict(plain.state_dict())


def test_a_step_without_gradients_leaves_the_rows_alone():
    memory = ReplicatedMemory(3, 2, "backprop")
    memory.enqueue(torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 2]))
    before = memory.rows.detach().clone()
    memory.step()
    assert torch.equal(memory.rows, before)
