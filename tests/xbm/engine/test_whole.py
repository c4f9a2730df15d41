"""Every pair at once: value, weights and sides of a whole matrix."""

import math

import pytest
import torch

from tests.known import NAMES
from xbm.engine.whole import whole
from xbm.losses import LOSSES


def matrix(m=6, M=29, seed=0):
    torch.manual_seed(seed)
    S = (torch.rand(M, m, dtype=torch.float64) * 2 - 1) * 0.98
    kind = torch.randint(0, 4, (M, m))
    positive, negative = kind == 0, (kind == 1) | (kind == 2)  # the rest is neither
    negative[:, 1] |= positive[:, 1]
    positive[:, 1] = False
    positive[:, 2] |= negative[:, 2]
    negative[:, 2] = False
    positive[:, 3] = negative[:, 3] = False
    return S, positive, negative


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", NAMES)
def test_each_anchors_loss_is_that_of_the_plain_formula(name, reduction):
    loss_fn = LOSSES[name](reduction=reduction)
    S, positive, negative = matrix()
    found = whole(loss_fn, S, positive, negative)
    assert torch.allclose(found.combined.loss, loss_fn.dense(S.T, positive.T, negative.T), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_lie_on_their_own_side_only(name):
    S, positive, negative = matrix()
    found = whole(LOSSES[name](), S, positive, negative)
    assert (found.positive_weights[~positive] == 0).all() and (found.negative_weights[~negative] == 0).all()
    assert found.positive_weights.abs().sum() > 0 and found.negative_weights.sum() > 0
    assert (found.positive_weights[:, 3] == 0).all() and found.combined.loss[3] == 0


@pytest.mark.parametrize("name", NAMES)
def test_sides_hold_the_extremes_and_the_counts_of_non_zero_weights(name):
    S, positive, negative = matrix(seed=1)
    found = whole(LOSSES[name](), S, positive, negative)
    for i in range(S.shape[1]):
        P, N = [[float(s) for s, here in zip(S[:, i], side[:, i]) if here] for side in (positive, negative)]
        assert found.p.lowest[i] == min(P, default=math.inf) and found.p.highest[i] == max(P, default=-math.inf)
        assert found.n.highest[i] == max(N, default=-math.inf)
        if found.combined.active is None or found.combined.active[i]:
            assert found.p.count[i] == (found.positive_weights[:, i] != 0).sum()
            assert found.n.count[i] == (found.negative_weights[:, i] != 0).sum()


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_at_all_give_zero(name):
    nothing = torch.zeros(0, 4, dtype=torch.bool)
    found = whole(LOSSES[name](), torch.zeros(0, 4), nothing, nothing)
    assert found.combined.loss.tolist() == [0.0] * 4
    assert found.positive_weights.shape == found.negative_weights.shape == (0, 4)


def test_only_a_loss_that_ranks_its_positives_sorts_them():
    S, positive, negative = matrix()
    assert whole(LOSSES["contrastive"](), S, positive, negative).p.ranked is None
    ranked = whole(LOSSES["triplet"](), S, positive, negative).p.ranked
    for i in range(S.shape[1]):
        assert ranked[: int(positive[:, i].sum()), i].tolist() == sorted(S[positive[:, i], i].tolist())
        assert (ranked[int(positive[:, i].sum()) :, i] == math.inf).all()
