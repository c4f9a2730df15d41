"""Margin loss: Σ_P [d − β + α]₊ + Σ_N [β + α − d]₊ with d = √(2 − 2S), by hand."""

import math

import pytest
import torch

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor
from xbm import CrossBatchMemory, MarginLoss
from xbm.losses.margin import NEAREST


def terms(P, N, boundary, margin):
    far = [max(0.0, math.sqrt(2 - 2 * s) - boundary + margin) for s in P]
    near = [max(0.0, boundary + margin - math.sqrt(2 - 2 * s)) for s in N]
    return far, near


def sizes(P, N, boundary, margin, reduction):
    far, near = terms(P, N, boundary, margin)
    if reduction == "sum":
        return 1, 1
    if reduction == "balanced":
        pull, push = (sum(1 / math.sqrt(2 - 2 * s) for s, x in zip(S, side) if x > 0) for S, side in ((P, far), (N, near)))
        return 1, max(1, max(push, 1) / max(pull, 1))
    return max(sum(x > 0 for x in far), 1), max(sum(x > 0 for x in near), 1)


def value(P, N, boundary, margin, reduction):
    far, near = terms(P, N, boundary, margin)
    of_far, of_near = sizes(P, N, boundary, margin, reduction)
    return sum(far) / of_far + sum(near) / of_near


def weights(P, N, boundary, margin, reduction):
    far, near = terms(P, N, boundary, margin)
    of_far, of_near = sizes(P, N, boundary, margin, reduction)
    return (
        [1 / math.sqrt(2 - 2 * s) / of_far if x > 0 else 0.0 for s, x in zip(P, far)],
        [1 / math.sqrt(2 - 2 * s) / of_near if x > 0 else 0.0 for s, x in zip(N, near)],
    )


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize(("boundary", "margin"), [(1.2, 0.2), (0.9, 0.05), (1.9, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, boundary, margin, reduction):
    assert_formula(
        lambda **kw: MarginLoss(boundary=boundary, margin=margin, reduction=reduction, **kw),
        lambda P, N: value(P, N, boundary, margin, reduction),
        lambda P, N: weights(P, N, boundary, margin, reduction),
        case(seed),
        steepness=reduction != "balanced",  # the share of the negatives is a constant
    )


def test_mean_counts_only_valid_pairs_on_either_side():
    S = {d: 1 - d * d / 2 for d in (0.3, 1.1, 1.3, 0.7, 1.9)}
    loss, on_positives, on_negatives = one_anchor(MarginLoss(reduction="mean"), [S[0.3], S[1.1], S[1.3]], [S[0.7], S[1.9]])
    assert loss == pytest.approx((0.1 + 0.3) / 2 + 0.7)
    assert on_positives == pytest.approx([0, 1 / 1.1 / 2, 1 / 1.3 / 2]) and on_negatives == pytest.approx([1 / 0.7, 0])


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("as_label", [0, 1], ids=["as positives", "as negatives"])
def test_identical_points_have_a_distance_away_from_zero_and_a_gradient_without_nan(engine, as_label):
    point = torch.tensor([[0.6, 0.8, 0.0]], dtype=torch.float64)
    memory = CrossBatchMemory(2, 3, dtype=torch.float64)
    memory.enqueue(torch.cat([point, -point]), torch.tensor([as_label, 1]), torch.tensor([5, 6]))
    v = point.clone().requires_grad_()
    loss = MarginLoss(boundary=0.1, margin=0.2, engine=engine)(v, torch.tensor([0]), memory, ids=torch.tensor([9]))
    loss.backward()
    expected = (NEAREST - 0.1 + 0.2) if as_label == 0 else (0.1 + 0.2 - NEAREST)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert (v.grad == 0).all()  # clamped: the row pulls and pushes at nothing
