"""Triplet loss: Σ_{k∈P, j∈N} [S_ij − S_ik + η]₊ over every triplet, by hand."""

import math
import random

import pytest
import torch

import xbm.engine.streaming as streaming
from tests.xbm.losses.by_hand import assert_formula, case, one_anchor, unit
from xbm import CrossBatchMemory, TripletLoss
from xbm.losses.triplet import FEW


def value(P, N, margin, reduction):
    total, valid = 0.0, 0
    for k in P:
        for j in N:
            if j - k + margin > 0:
                total += j - k + margin
                valid += 1
    return total / max(valid, 1) if reduction == "mean" else total


def weights(P, N, margin, reduction):
    on_positives = [float(sum(j - k + margin > 0 for j in N)) for k in P]
    on_negatives = [float(sum(j - k + margin > 0 for k in P)) for j in N]
    valid = max(sum(on_negatives), 1.0) if reduction == "mean" else 1.0
    return [w / valid for w in on_positives], [w / valid for w in on_negatives]


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("margin", [0.1, 0.37, -0.15])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, margin, reduction):
    assert_formula(
        lambda **kw: TripletLoss(margin=margin, reduction=reduction, **kw),
        lambda P, N: value(P, N, margin, reduction),
        lambda P, N: weights(P, N, margin, reduction),
        case(seed),
    )


def test_weights_are_the_papers_counts_of_triplets():
    """|P_ij|: a negative weighs as many positives as it comes within η of or beats; so does a positive, the other way."""
    loss, on_positives, on_negatives = one_anchor(TripletLoss(), [0.9, 0.6, 0.4], [0.55, 0.35, 0.1])
    assert on_negatives == [2.0, 1.0, 0.0]
    assert on_positives == [0.0, 1.0, 2.0]
    assert loss == pytest.approx((0.55 - 0.6 + 0.1) + (0.55 - 0.4 + 0.1) + (0.35 - 0.4 + 0.1))


def test_mean_divides_by_the_valid_triplets_not_by_all_of_them():
    loss, _, on_negatives = one_anchor(TripletLoss(reduction="mean"), [0.9, 0.6, 0.4], [0.55, 0.35, 0.1])
    assert loss == pytest.approx((0.05 + 0.25 + 0.05) / 3)
    assert on_negatives == pytest.approx([2 / 3, 1 / 3, 0])


# ------------------------------------------------------------------ more positives than are compared in turn

FORMS = {
    "single rows": {"SMALL": -1, "TILE": 4 * 23, "SPARSE": 1.0},
    "tiles": {"SMALL": -1, "TILE": 4 * 23, "SPARSE": -1.0},
    "whole columns": {"MOST_LISTED": -1},
    "few positives, single rows": {"SMALL": -1, "TILE": 4 * 23, "SPARSE": 1.0, "FEW": 100},
    "few positives, tiles": {"SMALL": -1, "TILE": 4 * 23, "SPARSE": -1.0, "FEW": 100},
    "few positives, whole columns": {"MOST_LISTED": -1, "FEW": 100},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
def test_many_positives_are_ranked_by_binary_search_in_every_form(form, reduction, monkeypatch):
    import xbm.losses.triplet as triplet

    for name, setting in FORMS[form].items():
        monkeypatch.setattr(triplet if name == "FEW" else streaming, name, setting)
    draw = random.Random(5).gauss
    m, M, D, margin = 4, 67, 4, 0.23
    labels, row_labels = [0, 1, 2, 3], [0 if j % 3 else 1 + j % 2 for j in range(M)]
    row_labels[-1] = 2
    centre = [[draw(0, 1) for _ in range(D)] for _ in range(4)]
    anchors = [unit([a + 0.5 * draw(0, 1) for a in centre[c]]) for c in labels]
    rows = [unit([a + 0.9 * draw(0, 1) for a in centre[c]]) for c in row_labels]
    for j in range(0, 60, 12):
        rows[j + 1] = rows[j + 2]  # equal similarities among the positives of anchor 0
    S = [[math.fsum(a * b for a, b in zip(v, row)) for row in rows] for v in anchors]
    total, gradient, most = 0.0, [], 0
    for i in range(m):
        P = [j for j in range(M) if row_labels[j] == labels[i]]
        N = [j for j in range(M) if row_labels[j] != labels[i]]
        most = max(most, len(P))
        total += value([S[i][k] for k in P], [S[i][j] for j in N], margin, reduction)
        wP, wN = weights([S[i][k] for k in P], [S[i][j] for j in N], margin, reduction)
        signed = [*zip(P, [-w for w in wP]), *zip(N, wN)]
        gradient.append([math.fsum(w * rows[j][d] for j, w in signed) / m for d in range(D)])
    assert most > 2 * FEW

    memory = CrossBatchMemory(M, D, dtype=torch.float64)
    memory.enqueue(torch.tensor(rows, dtype=torch.float64), torch.tensor(row_labels), torch.arange(M))
    v = torch.tensor(anchors, dtype=torch.float64, requires_grad=True)
    loss_fn = TripletLoss(margin=margin, reduction=reduction, engine="streaming")
    loss, stats = loss_fn(v, torch.tensor(labels), memory, ids=torch.arange(1000, 1000 + m), return_stats=True)
    loss.backward()
    assert loss.item() == pytest.approx(total / m, rel=1e-12)
    for got, row in zip(v.grad.tolist(), gradient):
        assert got == pytest.approx(row, rel=1e-9, abs=1e-11)
    for i in range(m):
        P, N = [[S[i][j] for j in range(M) if (row_labels[j] == labels[i]) == same] for same in (True, False)]
        wP, wN = weights(P, N, margin, "sum")
        assert stats.valid_positives[i] == sum(w > 0 for w in wP)
        assert stats.valid_negatives[i] == sum(w > 0 for w in wN)
