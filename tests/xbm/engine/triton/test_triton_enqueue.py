"""The enqueue kernel against the queue."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import unit
from xbm import CrossBatchMemory
from xbm.engine import triton as kernels

BUFFERS = ("rows", "row_labels", "row_ids", "stamps", "pointer", "count", "clock", "latest", "unsound")


def by_kernel(memory, v, labels, ids=None, mask=None, via=kernels.enqueue):
    with torch.no_grad():
        via(v, labels, ids, mask, *(getattr(memory, name) for name in BUFFERS))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_the_enqueue_kernel_does_what_the_queue_does(stored):
    plain, fast = (CrossBatchMemory(11, 6, dtype=stored) for _ in range(2))
    for m in (4, 1, 9, 40, 11, 3):  # 40: more than a block of the kernel, and than the memory
        v, labels, ids, mask = unit(m, 6), torch.randint(0, 9, (m,)), torch.randint(0, 99, (m,)), torch.rand(m) < 0.7
        for extra in ({}, {"ids": ids}, {"ids": ids, "mask": mask}, {"mask": mask & False}):
            plain.enqueue(v, labels, **extra)
            by_kernel(fast, v, labels, **extra)
            for name in BUFFERS:
                assert torch.equal(getattr(plain, name), getattr(fast, name)), (m, name)


def test_the_enqueue_kernel_leaves_unsound_rows_out_and_counts_them():
    memory = CrossBatchMemory(9, 5)
    v = unit(6, 5)
    v[1], v[2] = torch.nan, v[2] * 2
    before = memory.rows._version
    by_kernel(memory, v, torch.arange(6), torch.tensor([0, 1, 2, -1, 4, 5]), torch.tensor([1, 1, 1, 1, 1, 0]).bool())
    assert memory.labels.tolist() == [0, 4] and len(memory) == 2 and int(memory.unsound) == 3
    assert torch.equal(memory.embeddings, v[[0, 4]]) and int(memory.latest) == 2 and int(memory.clock) == 1
    assert memory.rows._version > before, "autograd must notice"
    by_kernel(memory, v * torch.nan, torch.arange(6))
    assert len(memory) == 2 and int(memory.unsound) == 9 and int(memory.latest) == 2 and int(memory.clock) == 1


def test_the_enqueue_compiles_into_one_graph():
    plain, fast = (CrossBatchMemory(7, 5) for _ in range(2))
    step = torch.compile(lambda m, v, y: by_kernel(m, v, y), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        v, labels = unit(3, 5), torch.arange(3)
        by_kernel(plain, v, labels)
        step(fast, v, labels)
    assert all(torch.equal(getattr(plain, name), getattr(fast, name)) for name in BUFFERS)
