"""Contrastive loss: Σ_P (1 − S) + Σ_N [S − λ]₊, by hand."""

import pytest

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor
from xbm import ContrastiveLoss


def value(P, N, margin, reduction):
    attract = repel = 0.0
    for s in P:
        attract += 1 - s
    valid = 0
    for s in N:
        if s > margin:
            repel += s - margin
            valid += 1
    if reduction == "mean":
        return attract / max(len(P), 1) + repel / max(valid, 1)
    if reduction == "balanced" and valid > max(len(P), 1):
        return attract + repel * max(len(P), 1) / valid
    return attract + repel


def weights(P, N, margin, reduction):
    above = sum(s > margin for s in N)
    each, every = (1 / max(len(P), 1), 1 / max(above, 1)) if reduction == "mean" else (1.0, 1.0)
    if reduction == "balanced" and above > max(len(P), 1):
        every = max(len(P), 1) / above
    return [each for _ in P], [every if s > margin else 0.0 for s in N]


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("margin", [0.5, 0.31, -0.2])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, margin, reduction):
    assert_formula(
        lambda **kw: ContrastiveLoss(margin=margin, reduction=reduction, **kw),
        lambda P, N: value(P, N, margin, reduction),
        lambda P, N: weights(P, N, margin, reduction),
        case(seed),
    )


def test_the_default_margin_is_one_half():
    loss, on_positives, on_negatives = one_anchor(ContrastiveLoss(), [0.25], [0.75, 0.5, 0.49])
    assert loss == pytest.approx((1 - 0.25) + (0.75 - 0.5))
    assert (on_positives, on_negatives) == ([1.0], [1.0, 0.0, 0.0])  # the paper's weights; at the margin itself: none


def test_mean_counts_only_negatives_above_the_margin_and_every_positive():
    loss, on_positives, on_negatives = one_anchor(ContrastiveLoss(reduction="mean"), [1.0, 0.2], [0.9, 0.7, -0.3, 0.1, 0.2])
    assert loss == pytest.approx((0 + 0.8) / 2 + (0.4 + 0.2) / 2)
    assert on_positives == pytest.approx([0.5, 0.5]) and on_negatives == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_balanced_is_the_sum_until_the_negatives_outnumber_the_positives():
    few = one_anchor(ContrastiveLoss(reduction="balanced"), [0.9, 0.2], [0.9, 0.7, 0.4])
    assert few == one_anchor(ContrastiveLoss(), [0.9, 0.2], [0.9, 0.7, 0.4])
    loss, on_positives, on_negatives = one_anchor(ContrastiveLoss(reduction="balanced"), [0.9, 0.2], [0.9, 0.8, 0.7, 0.6, 0.1])
    assert on_positives == [1.0, 1.0] and on_negatives == pytest.approx([0.5, 0.5, 0.5, 0.5, 0])
    assert loss == pytest.approx(0.1 + 0.8 + (0.4 + 0.3 + 0.2 + 0.1) / 2)


def test_balanced_pushes_an_anchor_without_positives_with_the_weight_of_one_pair():
    loss, _, on_negatives = one_anchor(ContrastiveLoss(reduction="balanced"), [], [0.9, 0.7, 0.1])
    assert loss == pytest.approx((0.4 + 0.2) / 2) and on_negatives == pytest.approx([0.5, 0.5, 0])
