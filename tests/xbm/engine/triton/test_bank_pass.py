"""The pass over the bank, however it is cut up, and with exponents beyond the range of numbers."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import LONG, LOSSES, check, memory_with
from xbm import CrossBatchMemory, MultiSimilarityLoss
from xbm.engine.triton import plan


@pytest.mark.parametrize(
    "tiles",
    [
        plan.Tiles(64, 64, 64, 64, True, 8, 3, 1),
        plan.Tiles(64, 64, 64, 64, True, 4, 3, 1),
        plan.Tiles(16, 64, 32, 16, False, 4, 2, 4),  # two slices of columns, two blocks of anchors, three splits
    ],
    ids=["second product always", "when needed", "wide rows"],
)
@pytest.mark.parametrize("name", LONG)
def test_half_banks_however_they_are_cut_up(name, tiles, monkeypatch):
    monkeypatch.setattr(plan, "tiles", lambda D, half, heavy, shared: tiles)
    anchors, labels, ids, memory = memory_with(m=18, M=140, D=37, stored=torch.float16)
    check(LOSSES[name](engine="triton"), anchors, labels, memory, ids, tolerance=2e-5)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_exponents_that_no_number_can_hold(stored, monkeypatch):
    """One program meets ever harder negatives: what it added up before has to shrink, and is not always nothing."""
    monkeypatch.setattr(plan, "resources", lambda device: (1, 227 * 1024))
    S = torch.cat([torch.full((70,), 0.25), torch.full((70,), 0.5), torch.tensor([0.515625, 0.75, 0.9, 0.6])])
    rows = torch.cat([S[:, None], torch.zeros(144, 9)], 1)
    rows[torch.arange(144), torch.arange(144) % 9 + 1] = (1 - S**2).sqrt()
    memory = CrossBatchMemory(144, 10, dtype=stored)
    memory.enqueue(rows, torch.arange(144) // 143, torch.arange(144))  # the last one is the positive
    anchors = torch.eye(2, 10).requires_grad_()
    for base in (0.2, 0.48):  # logits up to 20, 120, 280; and -92, 8, 168
        anchors.grad = None
        loss_fn = MultiSimilarityLoss(alpha=150, beta=400, base=base, epsilon=2, engine="triton")
        check(loss_fn, anchors, torch.tensor([1, 1]), memory, torch.tensor([500, 501]), tolerance=1e-4)


def test_more_programs_than_are_added_up_at_once(monkeypatch):
    monkeypatch.setattr(plan, "resources", lambda device: (40, 227 * 1024))
    monkeypatch.setattr(plan, "tiles", lambda D, half, heavy, shared: plan.Tiles(16, 16, 64, 64, True, 4, 2, 1))
    anchors, labels, ids, memory = memory_with(m=2, M=16 * 40, D=8)
    assert plan.plan(2, 640, 8, False, False, anchors.device).num_splits == 40
    check(MultiSimilarityLoss(engine="triton"), anchors, labels, memory, ids)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LONG)
def test_large_banks_find_positives_first_and_look_at_labels_late(name, stored, monkeypatch):
    """What a step does beyond so many rows, with few."""
    monkeypatch.setattr(plan, "SMALL", -1)
    anchors, labels, ids, memory = memory_with(m=18, M=140, D=24, stored=stored)
    check(LOSSES[name](engine="triton"), anchors, labels, memory, ids, tolerance=2e-5)
