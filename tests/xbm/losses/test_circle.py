"""Circle loss: log(1 + Σ_N e^{γ a_n (S − m)} · Σ_P e^{−γ a_p (S − 1 + m)}), its weights a held constant, by hand."""

import math

import pytest
import torch

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor, slope
from xbm import CircleLoss


def factors(P, N, m):
    return [max(0.0, 1 + m - s) for s in P], [max(0.0, s + m) for s in N]


def value(P, N, m, gamma, constant=None):
    """With `constant` the factors (a_p, a_n) do not move with the similarities."""
    if not P or not N:
        return 0.0
    pull, push = constant or factors(P, N, m)
    of_negatives = sum(math.exp(gamma * a * (s - m)) for a, s in zip(push, N))
    of_positives = sum(math.exp(-gamma * a * (s - 1 + m)) for a, s in zip(pull, P))
    return math.log(1 + of_negatives * of_positives)


def weights(P, N, m, gamma):
    if not P or not N:
        return [0.0] * len(P), [0.0] * len(N)
    pull, push = factors(P, N, m)
    of_negatives = [math.exp(gamma * a * (s - m)) for a, s in zip(push, N)]
    of_positives = [math.exp(-gamma * a * (s - 1 + m)) for a, s in zip(pull, P)]
    product = sum(of_negatives) * sum(of_positives)
    share = product / (1 + product)
    return (
        [share * gamma * a * e / sum(of_positives) for a, e in zip(pull, of_positives)],
        [share * gamma * a * e / sum(of_negatives) for a, e in zip(push, of_negatives)],
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("margin", "gamma"), [(0.25, 80.0), (0.4, 13.0), (0.1, 2.5)])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, margin, gamma, reduction):
    assert_formula(
        lambda **kw: CircleLoss(margin=margin, gamma=gamma, reduction=reduction, **kw),
        lambda P, N: value(P, N, margin, gamma),
        lambda P, N: weights(P, N, margin, gamma),
        case(seed),
        steepness=False,
    )


def test_the_factors_are_constants_to_the_gradient():
    P, N, m, gamma = [0.6, 0.3], [0.2, 0.5, -0.6], 0.3, 5.0
    _, on_positives, on_negatives = one_anchor(CircleLoss(margin=m, gamma=gamma), P, N)
    held = factors(P, N, m)
    detached = [slope(lambda s: value(P, s, m, gamma, held), N, j) for j in range(3)]
    attached = [slope(lambda s: value(P, s, m, gamma), N, j) for j in range(3)]
    assert on_negatives == pytest.approx(detached, abs=1e-7)
    assert on_negatives[1] != pytest.approx(attached[1], rel=0.1), "the case tells the two apart"
    assert on_positives == pytest.approx([-slope(lambda s: value(s, N, m, gamma, held), P, k) for k in range(2)], abs=1e-7)


def test_a_negative_far_below_the_margin_weighs_nothing_but_stays_in_the_sum():
    loss, _, on_negatives = one_anchor(CircleLoss(margin=0.25, gamma=4.0), [0.5], [-0.7, 0.3])
    assert on_negatives[0] == 0 < on_negatives[1]
    assert loss == pytest.approx(value([0.5], [-0.7, 0.3], 0.25, 4.0), rel=1e-12)  # its e^0 is there


def test_one_side_alone_adds_nothing():
    for P, N in (([0.3, 0.6], []), ([], [0.7, 0.4])):
        assert one_anchor(CircleLoss(), P, N) == (0.0, [0.0] * len(P), [0.0] * len(N))


def test_a_large_gamma_stays_finite():
    S, positive = torch.tensor([[-0.9, 0.95]]), torch.tensor([[True, False]])
    loss_fn = CircleLoss(gamma=5000.0)
    expected = 5000 * 1.2 * 0.7 + 5000 * 2.15 * 1.65
    assert loss_fn.dense(S, positive, ~positive).item() == pytest.approx(expected, rel=1e-6)
    assert loss_fn.weights(S, positive, ~positive).tolist() == [pytest.approx([5000 * 2.15, 5000 * 1.2], rel=1e-6)]
