"""The oracle: the whole matrix, the plain formula, autograd."""

import math

import pytest
import torch

from tests.xbm.engine.pairs import pairing
from xbm import ContrastiveLoss
from xbm.engine import reference


def test_it_divides_by_all_anchors_and_counts_only_the_pairs_of_the_pairing():
    anchors, p = pairing()
    value, _ = reference.compare(ContrastiveLoss(margin=0.1), anchors, p, stats=False)
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
    assert torch.autograd.gradcheck(
        lambda v, rows: reference.compare(loss_fn, v, p._replace(rows=rows), False)[0], (anchors, p.rows)
    )
    value, _ = reference.compare(loss_fn, anchors, p, False)
    (of_anchors,) = torch.autograd.grad(value, anchors, create_graph=True)
    (second,) = torch.autograd.grad(of_anchors.sum(), p.rows)  # each pair's weight is 1, so this counts pairs
    positive, negative = p.masks()
    hot = negative & ((p.rows @ anchors.T) > -0.5)
    counts = (hot.sum(1) - positive.sum(1)) / len(anchors)
    assert torch.allclose(second, counts[:, None].expand_as(second).double())


def test_statistics_only_if_asked_and_without_a_graph():
    anchors, p = pairing()
    anchors.requires_grad_()
    assert reference.compare(ContrastiveLoss(), anchors, p, False)[1] == ()
    stats = reference.compare(ContrastiveLoss(), anchors, p, True)[1]
    assert len(stats) == 5 and not any(x.requires_grad for x in stats)


@pytest.mark.parametrize(("given_", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_half_anchors_are_widened_and_autocast_is_kept_out(given_, wide):
    anchors, p = pairing(dtype=given_)
    plain, _ = reference.compare(ContrastiveLoss(), anchors, p, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = reference.compare(ContrastiveLoss(), anchors, p, False)
    assert plain.dtype == wide and torch.equal(plain, cast)
