"""The studied loss is the library's at ρ = 1, and does what it says elsewhere; with both engines."""

import pytest
import torch
from torch.nn.functional import normalize

from paper.balance import PushedContrastiveLoss
from xbm import ContrastiveLoss, CrossBatchMemory


def scene():
    torch.manual_seed(3)
    anchors = normalize(torch.randn(7, 4, dtype=torch.float64) + 1.0).requires_grad_()
    memory = CrossBatchMemory(53, 4, dtype=torch.float64)
    memory.enqueue(normalize(torch.randn(53, 4, dtype=torch.float64) + 1.0), torch.arange(53) % 5, torch.arange(53))
    return anchors, torch.arange(7) % 5, memory, torch.arange(100, 107)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_at_one_it_is_the_balanced_loss_and_without_bound_the_sum(engine):
    for push, same in ((1.0, "balanced"), (1e9, "sum")):
        made = []
        for loss in (
            PushedContrastiveLoss(push=push, reduction="balanced", engine=engine),
            ContrastiveLoss(reduction=same, engine=engine),
        ):
            anchors, labels, memory, ids = scene()
            value = loss(anchors, labels, memory, ids=ids)
            value.backward()
            made.append((value.item(), anchors.grad))
        (one, gradient), (other, expected) = made
        assert one == pytest.approx(other, rel=1e-12)
        torch.testing.assert_close(gradient, expected)


def test_negatives_weigh_at_most_rho_times_the_positives():
    S = torch.tensor([[0.9, 0.8, 0.9, 0.8, 0.7, 0.6]], dtype=torch.float64)
    positive = torch.tensor([[True, True, False, False, False, False]])
    weights = PushedContrastiveLoss(push=1.5, reduction="balanced").weights(S, positive, ~positive)
    assert weights.tolist()[0] == pytest.approx([1, 1, 0.75, 0.75, 0.75, 0.75])
