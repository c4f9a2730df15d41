"""What keyed memories do on a GPU against what they do elsewhere."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import unit
from xbm import CrossBatchMemory
from xbm.engine import triton as kernels
from xbm_app.train.label_errors import ASIDE

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
            memory.stamps[m % 7 :: 7] = ASIDE
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
