"""Every pair at once: value, weights and sides of a whole matrix; the reference engine."""

import math

import pytest
import torch

from tests.known import NAMES
from tests.xbm.engine.pairs import pairing
from xbm import ContrastiveLoss
from xbm.engine.dense import reference, statistics, weights, whole
from xbm.engine.streaming import Sums
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


def test_weights_have_one_anchor_per_row_and_no_graph():
    S = torch.tensor([[0.9, 0.6, 0.4], [0.1, 0.7, 0.8]], requires_grad=True)
    positive = torch.tensor([[True, False, False], [False, True, False]])
    w = weights(ContrastiveLoss(), S, positive, ~positive)
    assert w.tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]] and not w.requires_grad


def test_an_inactive_anchor_has_no_valid_pairs_but_keeps_its_extremes():
    p, n = Sums(torch.zeros(2, 1)).side, Sums(torch.zeros(2, 1)).side
    p.count, n.count = torch.tensor([3, 4]), torch.tensor([5, 6])
    p.lowest, p.highest, n.highest = torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]), torch.tensor([0.5, 0.6])
    positives, negatives, hardest, easiest_positive, hardest_positive = statistics(torch.tensor([True, False]), p, n)
    assert positives.tolist() == [3, 0] and negatives.tolist() == [5, 0]
    assert (hardest is n.highest, easiest_positive is p.highest, hardest_positive is p.lowest) == (True, True, True)
    assert statistics(None, p, n)[0].tolist() == [3, 4]


# ------------------------------------------------------------------ the reference engine


def test_it_divides_by_all_anchors_and_counts_only_the_pairs_of_the_pairing():
    anchors, p = pairing()
    (value,) = reference(ContrastiveLoss(margin=0.1), anchors, p, stats=False)
    positive, negative = (mask.T.tolist() for mask in p.masks())
    total = 0.0
    for i, v in enumerate(anchors.tolist()):
        for j, row in enumerate(p.rows.tolist()):
            s = math.fsum(a * b for a, b in zip(v, row))
            total += (1 - s) * positive[i][j] + max(0.0, s - 0.1) * negative[i][j]
    assert value.item() == pytest.approx(total / len(anchors), rel=1e-12)


def test_it_is_differentiable_in_anchors_and_rows_and_twice():
    anchors, p = pairing(M=23)
    anchors.requires_grad_()
    p.rows.requires_grad_()
    loss_fn = ContrastiveLoss(margin=-0.5)
    assert torch.autograd.gradcheck(lambda v, rows: reference(loss_fn, v, p._replace(rows=rows), False)[0], (anchors, p.rows))
    (value,) = reference(loss_fn, anchors, p, False)
    (of_anchors,) = torch.autograd.grad(value, anchors, create_graph=True)
    (second,) = torch.autograd.grad(of_anchors.sum(), p.rows)  # each pair's weight is 1, so this counts pairs
    positive, negative = p.masks()
    hot = negative & ((p.rows @ anchors.T) > -0.5)
    counts = (hot.sum(1) - positive.sum(1)) / len(anchors)
    assert torch.allclose(second, counts[:, None].expand_as(second).double())


def test_statistics_only_if_asked_and_without_a_graph():
    anchors, p = pairing()
    anchors.requires_grad_()
    assert reference(ContrastiveLoss(), anchors, p, False)[1:] == ()
    stats = reference(ContrastiveLoss(), anchors, p, True)[1:]
    assert len(stats) == 5 and not any(x.requires_grad for x in stats)


@pytest.mark.parametrize(("given_", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_half_anchors_are_widened_and_autocast_is_kept_out(given_, wide):
    anchors, p = pairing(dtype=given_)
    (plain,) = reference(ContrastiveLoss(), anchors, p, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (cast,) = reference(ContrastiveLoss(), anchors, p, False)
    assert plain.dtype == wide and torch.equal(plain, cast)
