"""Devices without float64, such as Apple's: nothing that is computed from float32 may pass through it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.known import NAMES
from xbm import CrossBatchMemory, SupConLoss, TwoTowerLoss
from xbm.engine import streaming
from xbm.losses import LOSSES


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        wide = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype == torch.float64]
        if wide:
            raise TypeError(f"{func} made a float64 tensor")
        return result


@pytest.mark.parametrize("update", ["queue", "backprop"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_float32(name, update, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", -1)
    monkeypatch.setattr(streaming, "MOST_LISTED", -1)  # fixed shapes, as on every device that is not a CPU
    loss_fn = LOSSES[name]()
    with NoFloat64():
        anchors = F.normalize(torch.randn(7, 5)).requires_grad_()
        labels, ids = torch.arange(7) % 3, torch.arange(7)
        memory = CrossBatchMemory(23, 5, update)
        memory.enqueue(anchors.detach(), labels, ids)
        loss, stats = loss_fn(anchors, labels, memory, ids=ids, return_stats=True)
        (loss + loss_fn(anchors, labels, ids=ids)).backward()
        memory.step()
    assert anchors.grad.dtype == stats.hardest_negative.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_both_towers_stay_float32(name, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", -1)
    monkeypatch.setattr(streaming, "MOST_LISTED", -1)
    criterion = TwoTowerLoss(LOSSES[name](), size=23, dim=5)
    with NoFloat64():
        queries, documents, negatives = (F.normalize(torch.randn(n, 5)).requires_grad_() for n in (7, 7, 9))
        for _ in range(2):  # against an empty memory and against one with rows
            criterion(queries, documents, labels=torch.arange(7) % 3, negatives=negatives).backward()
    assert queries.grad.dtype == documents.grad.dtype == negatives.grad.dtype == torch.float32


def test_a_learned_temperature_stays_float32():
    loss_fn = SupConLoss(temperature=0.1, learn_temperature=True)
    with NoFloat64():
        queries, documents = (F.normalize(torch.randn(7, 5)).requires_grad_() for _ in range(2))
        loss_fn(queries, torch.arange(7), references=documents).backward()
        assert loss_fn.log_temperature.grad.dtype == loss_fn.temperature.dtype == torch.float32


def test_the_mode_sees_float64():
    with NoFloat64(), pytest.raises(TypeError, match="made a float64 tensor"):
        torch.ones(3).double()
