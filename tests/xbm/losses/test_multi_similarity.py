"""Multi-similarity loss with and without its mining, by hand."""

import math

import pytest
import torch

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor, pairs, similarities
from xbm import MultiSimilarityLoss


def mine(P, N, epsilon):
    """Which positives and which negatives stay."""
    if not P or not N:
        return [False] * len(P), [False] * len(N)
    return [s < max(N) + epsilon for s in P], [s > min(P) - epsilon for s in N]


def kept(P, N, o):
    return mine(P, N, o["epsilon"]) if o["mining"] else ([True] * len(P), [True] * len(N))


def value(P, N, o):
    keep_p, keep_n = kept(P, N, o)
    if o["mining"] and not (any(keep_p) and any(keep_n)):
        return 0.0
    attract = sum(math.exp(-o["alpha"] * (s - o["base"])) for s, k in zip(P, keep_p) if k)
    repel = sum(math.exp(o["beta"] * (s - o["base"])) for s, k in zip(N, keep_n) if k)
    return math.log(1 + attract) / o["alpha"] + math.log(1 + repel) / o["beta"]


def weights(P, N, o):
    keep_p, keep_n = kept(P, N, o)
    attract = [math.exp(-o["alpha"] * (s - o["base"])) if k else 0.0 for s, k in zip(P, keep_p)]
    repel = [math.exp(o["beta"] * (s - o["base"])) if k else 0.0 for s, k in zip(N, keep_n)]
    return [e / (1 + sum(attract)) for e in attract], [e / (1 + sum(repel)) for e in repel]


DEFAULTS = {"alpha": 2.0, "beta": 40.0, "base": 0.5, "epsilon": 0.1, "mining": True}
OPTIONS = {
    "defaults": {},
    "another shape": {"alpha": 3.5, "beta": 11.0, "base": 0.2, "epsilon": 0.03},
    "strict mining": {"epsilon": -0.2},
    "no mining": {"mining": False},
    "no mining, another shape": {"mining": False, "alpha": 1.3, "beta": 7.0, "base": -0.1},
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, options, reduction):
    o = {**DEFAULTS, **OPTIONS[options]}
    assert_formula(
        lambda **kw: MultiSimilarityLoss(**OPTIONS[options], reduction=reduction, **kw),
        lambda P, N: value(P, N, o),
        lambda P, N: weights(P, N, o),
        case(seed, spread=0.4),
    )


def test_the_cases_above_hold_pairs_that_mining_drops_and_pairs_that_it_keeps():
    c = case(1, spread=0.4)
    S = similarities(c)
    found = [mine([S[i][k] for k in pairs(c, i)[0]], [S[i][j] for j in pairs(c, i)[1]], 0.1) for i in range(3)]
    assert {True, False} == {k for P, _ in found for k in P} == {k for _, N in found for k in N}


def test_mining_keeps_a_negative_above_the_hardest_positive_less_epsilon():
    P, N = [0.8, 0.5], [0.41, 0.39, 0.6]  # min P − ε = 0.4; max N + ε = 0.7
    _, on_positives, on_negatives = one_anchor(MultiSimilarityLoss(), P, N)
    assert [w > 0 for w in on_positives] == [False, True]
    assert [w > 0 for w in on_negatives] == [True, False, True]


def test_dropped_pairs_leave_the_normalisation_too():
    loss_fn = MultiSimilarityLoss()
    mined, on_positives, on_negatives = one_anchor(loss_fn, [0.8, 0.5], [0.41, 0.39, 0.6])
    alone, same_positives, same_negatives = one_anchor(MultiSimilarityLoss(mining=False), [0.5], [0.41, 0.6])
    assert mined == pytest.approx(alone, rel=1e-12)
    assert [on_positives[1]] == pytest.approx(same_positives)
    assert [on_negatives[0], on_negatives[2]] == pytest.approx(same_negatives)


def test_an_anchor_whose_pairs_are_all_easy_adds_nothing():
    loss, on_positives, on_negatives = one_anchor(MultiSimilarityLoss(), [0.9, 0.8], [0.1, -0.3])
    assert loss == 0 and on_positives == [0, 0] and on_negatives == [0, 0]


@pytest.mark.parametrize("mining", [True, False])
def test_an_anchor_with_one_side_only_counts_only_without_mining(mining):
    loss_fn = MultiSimilarityLoss(mining=mining)
    for P, N in (([0.3, 0.6], []), ([], [0.7, 0.4])):
        loss, on_positives, on_negatives = one_anchor(loss_fn, P, N)
        expected = value(P, N, {**DEFAULTS, "mining": mining})
        assert loss == pytest.approx(expected, rel=1e-12)
        assert (loss > 0) == any(w > 0 for w in on_positives + on_negatives) == (not mining)


def test_a_large_beta_neither_overflows_nor_loses_the_gradient():
    S = torch.tensor([[0.2, 0.99, -0.8]])  # float32, in which e^{500·0.49} is infinite
    positive = torch.tensor([[True, False, False]])
    loss_fn = MultiSimilarityLoss(beta=500.0)
    w = loss_fn.weights(S, positive, ~positive)
    assert torch.isfinite(w).all() and w[0, 1] == pytest.approx(1.0)
    assert loss_fn.dense(S, positive, ~positive).item() == pytest.approx(math.log(1 + math.exp(0.6)) / 2 + 0.49, rel=1e-6)
