"""The pass over the bank, however it is cut up, and with exponents beyond the range of numbers."""

import pytest
import torch
from interpreted import LOSSES, check, memory_with

from xbm import MultiSimilarityLoss
from xbm.engine.triton import plan


@pytest.mark.parametrize(
    "tiles",
    [
        plan.Tiles(64, 64, 64, 64, True, 8, 3, 1, always=True),
        plan.Tiles(64, 64, 64, 64, True, 4, 3, 1),
        plan.Tiles(16, 64, 32, 16, False, 4, 2, 4),  # two slices of columns, two blocks of anchors, three splits
    ],
    ids=["second product always", "when needed", "wide rows"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_half_banks_however_they_are_cut_up(name, tiles, monkeypatch):
    monkeypatch.setattr(plan, "tiles", lambda D, half, shared: tiles)
    anchors, labels, ids, memory = memory_with(m=18, M=140, D=37, stored=torch.float16)
    check(LOSSES[name](engine="triton"), anchors, labels, memory, ids, tolerance=2e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_exponents_that_no_number_can_hold(stored):
    anchors, labels, ids, memory = memory_with(M=150, stored=stored, spread=0.3)
    loss_fn = MultiSimilarityLoss(alpha=150, beta=400, base=0.2, epsilon=2, engine="triton")
    check(loss_fn, anchors, labels, memory, ids, tolerance=1e-4)
