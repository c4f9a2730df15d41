"""The kernels of the memory against the memory's own operations."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import IGNORED, unit
from xbm import CrossBatchMemory
from xbm.engine import triton as kernels
from xbm.engine.triton import memory_kernels, newest_copies
from xbm.engine.triton.plan import TABLE_SIZE
from xbm.memory import newest_copies as plain_newest_copies

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


# ------------------------------------------------------------------ keyed memories

KEPT = ("pointer", "latest")  # what only a queue changes
KEYED = ("rows", "row_labels", "row_ids", "stamps", "count", "clock", "unsound")


def keyed_by_kernel(memory, v, labels, ids, mask=None):
    with torch.no_grad():
        kernels.assign(v, labels, ids, mask, *(getattr(memory, name).detach() for name in KEYED), memory.momentum)


def same_memories(plain, fast):
    for name in (*KEYED, *KEPT):
        one, other = getattr(plain, name).detach().float(), getattr(fast, name).detach().float()
        close = {torch.float32: 1e-6, torch.float16: 1e-3}[plain.rows.dtype] if name == "rows" else 0.0
        assert torch.allclose(one, other, rtol=0, atol=close), name


@pytest.mark.parametrize(("D", "stored", "update", "momentum"), [  # D: less than a block of columns, one more than a block
    (6, torch.float32, "moving_average", 0.9), (257, torch.float32, "moving_average", 0.9),
    (6, torch.float16, "moving_average", 0.0), (257, torch.float16, "backprop", 0.5),
])  # fmt: skip
def test_the_keyed_kernel_does_what_the_keyed_memory_does(D, stored, update, momentum):
    plain, fast = (CrossBatchMemory(40, D, update, dtype=stored, momentum=momentum) for _ in range(2))
    for m in (4, 1, 70, 33):  # 70 rows: some ids come twice and more, in one block of the kernel and in two
        v, labels, ids, mask = unit(m, D), torch.randint(0, 9, (m,)), torch.randint(0, 40, (m,)), torch.rand(m) < 0.6
        for given in (None, mask, mask & False):
            plain.enqueue(v, labels, ids, given)
            keyed_by_kernel(fast, v, labels, ids, given)
            same_memories(plain, fast)
        for memory in (plain, fast):  # rows that are set aside are written as if nothing had been there
            memory.stamps[m % 7 :: 7] = IGNORED
            memory.count.copy_((memory.stamps >= 0).sum())
    assert 25 < len(fast) <= 40


def test_the_keyed_kernel_leaves_unsound_rows_out_and_the_sound_one_before_wins():
    memory = CrossBatchMemory(9, 5, "moving_average")
    v = unit(8, 5)
    v[1], v[4], v[7] = torch.nan, v[4] * 2, v[7] / 2
    before = memory.rows._version
    ids = torch.tensor([3, 3, 9, -1, 5, 6, 3, 3])  # rows 2 and 3: outside; of 0, 1, 6 and 7 with the id 3, 6 is the last sound
    keyed_by_kernel(memory, v, torch.arange(8), ids)
    assert memory.ids.tolist() == [3, 6] and memory.labels.tolist() == [6, 5] and torch.equal(memory.embeddings, v[[6, 5]])
    assert len(memory) == 2 and int(memory.unsound) == 5 and int(memory.clock) == 1 and memory.ages.tolist() == [0, 0]
    assert memory.rows._version > before, "autograd must notice"
    keyed_by_kernel(memory, v * torch.nan, torch.arange(8), ids)
    assert len(memory) == 2 and int(memory.unsound) == 13 and int(memory.clock) == 1


def test_a_memory_on_a_gpu_uses_the_kernels_it_has(monkeypatch):
    monkeypatch.setattr("xbm.memory.has_kernels", lambda device: True)
    made = []
    monkeypatch.setattr(kernels, "enqueue", lambda *given: made.append("enqueue"))
    monkeypatch.setattr(kernels, "assign", lambda *given: made.append("assign"))
    for update in ("queue", "moving_average", "backprop"):
        CrossBatchMemory(4, 3, update).enqueue(unit(2, 3), torch.arange(2), torch.arange(2))
    exact = CrossBatchMemory(4, 3, "moving_average", dtype=torch.float64)
    exact.enqueue(unit(2, 3), torch.arange(2), torch.arange(2))
    assert made == ["enqueue", "assign", "assign"] and len(exact) == 2, "float64 is kept exact, by torch"


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("D", [6, 513])
def test_rows_descend_as_the_memory_says(stored, D, monkeypatch):
    plain, fast = (CrossBatchMemory(7, D, "backprop", dtype=stored, alpha=0.7) for _ in range(2))
    rows, gradient = unit(7, D), torch.randn(7, D).to(stored)
    gradient[[0, 4]] = 0
    gradient[2, :-1] = 0  # a single number is a gradient too
    for memory in (plain, fast):
        memory.enqueue(rows, torch.arange(7), torch.arange(7))
        memory.rows.data[[0, 4]] *= 0.99  # what normalising would change
        memory.rows.grad = gradient.clone()
    before, version = fast.rows.detach().clone(), fast.rows._version
    plain.step()
    monkeypatch.setattr("xbm.memory.has_kernels", lambda device: True)
    fast.step()
    same_memories(plain, fast)
    assert fast.rows.grad is None and fast.rows._version > version and fast.rows.requires_grad
    assert torch.equal(fast.rows[[0, 4]], before[[0, 4]]) and not torch.equal(fast.rows[2], before[2])


# ------------------------------------------------------------------ newest copies


@pytest.mark.parametrize(("m", "M"), [(5, 3), (1, 1), (17, 300)])
def test_the_newest_copy_is_the_one_written_last(m, M):
    for pointer in (0, M // 3, M - 1):
        row_ids = torch.randint(-1, 9, (M,))
        stamps = torch.where(torch.rand(M) < 0.2, -1, 1)
        ids = torch.randint(0, 12, (m,))
        given = (ids, row_ids, stamps, torch.tensor(pointer))
        assert newest_copies(*given).tolist() == plain_newest_copies(*given).tolist()


def table_entry(i):
    """The entry of a number in the hash table, as the kernels compute it."""
    mixed = (i * -1640531527) % (1 << 32)
    mixed -= (mixed >= 1 << 31) << 32
    return (mixed >> 12) & (TABLE_SIZE - 1)


def test_ids_that_fall_on_the_same_place_are_told_apart(monkeypatch):
    twin = next(i for i in range(1, 1 << 20) if table_entry(i) == table_entry(7) and i != 7)
    row_ids = torch.tensor([7, twin, 3, 7, twin, twin, 5])
    given = (torch.tensor([twin, 7, 7, 4, 3]), row_ids, torch.ones(7, dtype=torch.int64), torch.tensor(5))
    assert newest_copies(*given).tolist() == plain_newest_copies(*given).tolist() == [4, 3, 3, -1, 2]
    monkeypatch.setattr(memory_kernels, "MAX_ANCHORS", 2)  # more anchors than the table can number
    assert newest_copies(*given).tolist() == [4, 3, 3, -1, 2]
