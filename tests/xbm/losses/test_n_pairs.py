"""N-pairs: 1/|P| Σ_k log(1 + Σ_j e^{(S_ij − S_ik)/τ}), by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor
from xbm import NPairsLoss


def value(P, N, t):
    total = 0.0
    for k in P:
        total += math.log(1 + sum(math.exp((j - k) / t) for j in N))
    return total / max(len(P), 1)


def weights(P, N, t):
    against = [sum(math.exp((j - k) / t) for j in N) for k in P]
    on_positives = [a / (1 + a) / (len(P) * t) for a in against]
    on_negatives = [sum(math.exp((j - k) / t) / (1 + a) for k, a in zip(P, against)) / (max(len(P), 1) * t) for j in N]
    return on_positives, on_negatives


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("temperature", [0.1, 0.57])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, temperature, reduction):
    assert_formula(
        lambda **kw: NPairsLoss(temperature=temperature, reduction=reduction, **kw),
        lambda P, N: value(P, N, temperature),
        lambda P, N: weights(P, N, temperature),
        case(seed),
    )


def test_with_one_positive_it_is_info_nce():
    logits = torch.tensor([[0.7, 0.4, 0.1, -0.3]], dtype=torch.float64) / 0.2
    loss, _, _ = one_anchor(NPairsLoss(temperature=0.2), [0.7], [0.4, 0.1, -0.3])
    assert loss == pytest.approx(F.cross_entropy(logits, torch.tensor([0])).item(), rel=1e-12)


def test_positives_do_not_compete_with_each_other():
    near, _, _ = one_anchor(NPairsLoss(), [0.6], [0.5])
    both, _, _ = one_anchor(NPairsLoss(), [0.6, 0.6], [0.5])
    assert both == pytest.approx(near, rel=1e-12)


def test_one_side_alone_adds_nothing():
    for P, N in (([0.3, 0.6], []), ([], [0.7, 0.4])):
        assert one_anchor(NPairsLoss(), P, N) == (0.0, [0.0] * len(P), [0.0] * len(N))
