"""Lifted structure: [log Σ_P e^{λ−S} + log Σ_N e^{S−λ}]₊, by hand."""

import math

import pytest

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor
from xbm import LiftedStructureLoss


def bracket(P, N, base):
    if not P or not N:
        return 0.0
    return math.log(sum(math.exp(base - s) for s in P)) + math.log(sum(math.exp(s - base) for s in N))


def weights(P, N, base):
    if bracket(P, N, base) <= 0:
        return [0.0] * len(P), [0.0] * len(N)
    of_positives, of_negatives = sum(math.exp(-s) for s in P), sum(math.exp(s) for s in N)
    return [math.exp(-s) / of_positives for s in P], [math.exp(s) / of_negatives for s in N]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("base", [0.5, 3.0, -0.4])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, base, reduction):
    assert_formula(
        lambda **kw: LiftedStructureLoss(base=base, reduction=reduction, **kw),
        lambda P, N: max(0.0, bracket(P, N, base)),
        lambda P, N: weights(P, N, base),
        case(seed),
    )


def test_a_bracket_below_zero_adds_nothing_and_pulls_at_nothing():
    assert bracket([0.9], [-0.2], 0.5) < 0
    assert one_anchor(LiftedStructureLoss(), [0.9], [-0.2]) == (0.0, [0.0], [0.0])


def test_just_above_zero_it_counts():
    assert bracket([0.3], [0.31], 0.5) > 0
    loss, on_positives, on_negatives = one_anchor(LiftedStructureLoss(), [0.3], [0.31])
    assert loss == pytest.approx(0.01) and on_positives == [1.0] and on_negatives == [1.0]
