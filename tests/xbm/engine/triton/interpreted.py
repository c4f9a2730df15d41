"""Odd-shaped memories and a float64 oracle, for the kernels under Triton's interpreter.

The interpreter is right for float32 and float16 products and wrong for bfloat16, so 16 bits are tested as float16.
"""

import pytest
import torch
import torch.nn.functional as F

from xbm import CrossBatchMemory
from xbm.losses import LOSSES

THREE = ("contrastive", "multi_similarity", "triplet")
FIVE = tuple(name for name in LOSSES if name not in THREE)
EVERY = [*THREE, *(pytest.param(name, marks=pytest.mark.slow) for name in FIVE)]  # test_loss_formulas.py has fast tests of five
LONG = [name if name == "contrastive" else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES]  # for long tests
IGNORED = -2  # the stamp that the applications give a row whose label is likely wrong


def unit(*shape, dtype=torch.float32):
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1).to(dtype)


def memory_with(m=5, M=83, D=19, stored=torch.float32, update="queue", classes=4, free=7, spread=0.9):
    """Anchors, labels, ids and a memory whose first slots are written: all kinds of pairs, some in every tile."""
    centres = torch.randn(classes, D, dtype=torch.float64)
    written = M - free
    row_labels = torch.randint(0, classes, (written,)) + (1 << 40)  # labels that differ in their higher halves only:
    row_labels[::9] -= 1 << 33
    row_ids = torch.randperm(M)[:written]
    rows = F.normalize(centres[row_labels % classes] + spread * torch.randn(written, D, dtype=torch.float64))
    labels = row_labels[torch.randint(0, written, (m,))] if written else torch.arange(m)
    ids = torch.randperm(3 * M + m)[:m]
    if written > m:
        row_ids[:m:2] = ids[: len(row_ids[:m:2])] if update == "queue" else row_ids[:m:2]
    labels[m // 2] = 5  # nobody else's
    anchors = F.normalize(centres[labels % classes] + spread * torch.randn(m, D, dtype=torch.float64)).float()
    memory = CrossBatchMemory(M, D, update, dtype=stored)
    if written:
        memory.enqueue(rows.float(), row_labels, row_ids)
    return anchors.to(stored).float().requires_grad_(), labels, ids, memory  # anchors that the stored type can hold


def oracle(loss_fn, anchors, labels, memory, ids, exclude):
    """Value, gradients and statistics from the dense engine in float64, on the numbers as stored."""
    v = anchors.detach().double().requires_grad_()
    twin = type(loss_fn)(**{k: getattr(loss_fn, k) for k in (*loss_fn.hyperparameters, "reduction")}, engine="reference")
    wide = None
    if memory is not None:
        wide = CrossBatchMemory(memory.size, memory.dim, memory.update, dtype=torch.float64)
        wide.load_state_dict({k: b.double() if k == "rows" else b for k, b in memory.state_dict().items()})
    value, stats = twin(v, labels, wide, ids=ids, exclude=exclude, return_stats=True)
    (value * 3).backward()
    return value.detach(), v.grad, None if wide is None else wide.rows.grad, stats


def check(loss_fn, anchors, labels, memory, ids, exclude=None, tolerance=1e-5):
    value, gradient, of_rows, stats = oracle(loss_fn, anchors, labels, memory, ids, exclude)
    loss, found = loss_fn(anchors, labels, memory, ids=ids, exclude=exclude, return_stats=True)
    (loss * 3).backward()
    assert loss.dtype == torch.float32 and anchors.grad.dtype == anchors.dtype
    assert abs(loss.double() - value) <= tolerance * max(value, 1e-6)
    assert (anchors.grad.double() - gradient).norm() <= tolerance * gradient.norm() + 1e-12
    if of_rows is not None:
        assert (memory.rows.grad.double() - of_rows).norm() <= tolerance * of_rows.norm()
    for name in ("valid_positives", "valid_negatives"):
        assert found[name].tolist() == stats[name].tolist(), name
    for name in ("hardest_negative", "easiest_positive", "hardest_positive"):
        assert torch.allclose(found[name].double(), stats[name], atol=1e-6), name
    assert int(found.unsound) == 0
    plain = loss_fn(anchors, labels, memory, ids=ids, exclude=exclude)  # without statistics: tiles may be skipped
    assert abs(plain.detach() - loss.detach()) <= 1e-6 * max(1.0, abs(float(value)))
    if of_rows is None:
        alone, direct = loss_fn.with_gradient(anchors, labels, memory, ids=ids, exclude=exclude)
        assert torch.equal(alone, plain.detach()) and not alone.requires_grad and direct.dtype == anchors.dtype
        assert (3 * direct.double() - gradient).norm() <= tolerance * gradient.norm() + 1e-12
    return loss
