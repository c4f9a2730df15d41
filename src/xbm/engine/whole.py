"""Every pair at once from a whole similarity matrix: the GPW weights, and losses too tangled for bank tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from xbm.engine.sums import weigh
from xbm.engine.terms import Combined, Loss, Side, Terms


class Whole(NamedTuple):
    combined: Combined
    positive_weights: Tensor  # (M, m)
    negative_weights: Tensor  # (M, m)
    p: Side
    n: Side


def whole(loss: Loss, S: Tensor, positive: Tensor, negative: Tensor) -> Whole:
    """Loss and weights of similarities S (M, m), an anchor a column."""
    p, n = Side.empty(S.shape[1], S), Side.empty(S.shape[1], S)
    order = None
    if len(S):
        apart = S.masked_fill(~positive, torch.inf)
        p.lowest, p.highest = apart.amin(0), S.masked_fill(~positive, -torch.inf).amax(0)
        n.highest = S.masked_fill(~negative, -torch.inf).amax(0)
        if loss.ranks_positives:
            p.ranked, order = apart.sort(dim=0)
    hot = negative & (loss.floor(p) < S)
    apart = S.masked_fill(~negative, -torch.inf) if loss.ranks_positives else S  # ranks count what they see
    against = loss.negative(apart, p, _same) if len(S) else Terms()
    _sum_up(n, against, hot)
    favour = Terms()
    if order is not None:
        assert against.beaten is not None
        p.beaten = against.beaten
        weight = torch.zeros_like(S).scatter(0, order, p.beaten.to(S.dtype))
        favour = Terms(value=torch.zeros_like(S), weight=weight, valid=weight > 0)
    elif len(S):
        favour = loss.positive(S, n, _same)
    good = positive if favour.valid is None else positive & favour.valid
    _sum_up(p, favour, good)
    c = loss.combine(p, n)
    return Whole(
        c,
        weigh(favour, good, p.lse, c.positive_sum, c.positive_lse),
        weigh(against, hot, n.lse, c.negative_sum, c.negative_lse),
        p,
        n,
    )


def _sum_up(side: Side, t: Terms, valid: Tensor) -> None:
    side.count = (valid if not isinstance(t.slope, Tensor) else valid & (t.slope > 0)).sum(0)
    if t.value is not None:
        side.value = torch.where(valid, t.value, 0).sum(0)
        weight = t.weight if isinstance(t.weight, Tensor) else torch.full_like(t.value, t.weight)
        side.weight = torch.where(valid, weight, 0).sum(0)
    if t.logit is not None and len(valid):
        side.lse = torch.where(valid, t.logit, -torch.inf).logsumexp(0)


def _same(x: Tensor) -> Tensor:
    return x
