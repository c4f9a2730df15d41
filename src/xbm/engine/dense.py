"""Every pair at once, from a whole similarity matrix: the reference engine, the GPW weights, and small problems."""

from typing import NamedTuple

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Combined, Loss, Side, Terms


def reference(loss: Loss, anchors: Tensor, pairing: Pairing, stats: bool) -> tuple[Tensor, ...]:
    """The reference engine: the loss's plain formula on the (m, M) matrix, differentiated by autograd; and the statistics."""
    assert pairing.sound is not None
    wide = torch.promote_types(anchors.dtype, torch.float32)
    with torch.autocast(anchors.device.type, enabled=False):
        if anchors.device.type != "cpu":  # an unsound anchor could not raise there; it must not spread NaN
            anchors = torch.where(pairing.sound[:, None], anchors, 0)
        rows = anchors if pairing.in_batch else pairing.rows
        S = anchors.to(wide) @ rows.to(wide).T
        positive, negative = (mask.T for mask in pairing.masks())
        value = loss.dense(S, positive, negative).sum() / len(anchors)
        if not stats:
            return (value,)
        with torch.no_grad():
            pairs = whole(loss, S.T, positive.T, negative.T)
            return value, *statistics(pairs.combined.active, pairs.p, pairs.n)


class Whole(NamedTuple):
    combined: Combined
    positive_weights: Tensor  # (M, m)
    negative_weights: Tensor  # (M, m)
    p: Side
    n: Side


def whole(loss: Loss, S: Tensor, positive: Tensor, negative: Tensor) -> Whole:
    """Loss and pair weights from the similarities S (M, m), one anchor per column."""
    p, n = _empty_side(S), _empty_side(S)
    order = None
    if len(S):
        positives = S.masked_fill(~positive, torch.inf)
        p.lowest, p.highest = positives.amin(0), S.masked_fill(~positive, -torch.inf).amax(0)
        n.highest = S.masked_fill(~negative, -torch.inf).amax(0)
        if loss.ranks_positives:
            p.ranked, order = positives.sort(dim=0)
    valid_negative = negative & (loss.floor(p) < S)
    seen = S.masked_fill(~negative, -torch.inf) if loss.ranks_positives else S  # ranks count all that they see
    repulsion = loss.negative(seen, p, lambda x: x) if len(S) else Terms()
    _sum_up(n, repulsion, valid_negative)
    attraction = Terms()
    if order is not None:
        assert repulsion.beaten is not None
        p.beaten = repulsion.beaten
        weight = torch.zeros_like(S).scatter(0, order, p.beaten.to(S.dtype))
        attraction = Terms(value=torch.zeros_like(S), weight=weight, valid=weight > 0)
    elif len(S):
        attraction = loss.positive(S, n, lambda x: x)
    valid_positive = positive if attraction.valid is None else positive & attraction.valid
    _sum_up(p, attraction, valid_positive)
    c = loss.combine(p, n)
    return Whole(
        c,
        pair_weights(attraction, valid_positive, p.lse, c.positive_sum, c.positive_lse),
        pair_weights(repulsion, valid_negative, n.lse, c.negative_sum, c.negative_lse),
        p,
        n,
    )


def weights(loss: Loss, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """(m, M): the GPW weights of a similarity matrix with one anchor per row."""
    with torch.no_grad():
        pairs = whole(loss, S.T, positive.T, negative.T)
        return (pairs.positive_weights + pairs.negative_weights).T


def pair_weights(t: Terms, valid: Tensor, lse: Tensor, sum_scale: Tensor | float, lse_scale: Tensor | float) -> Tensor:
    """The final weights of pairs, once the sums are complete: (T, m) for a tile, with per-anchor tensors (m,)."""
    total = torch.zeros((), dtype=lse.dtype, device=lse.device)
    if t.value is not None:
        total = total + sum_scale * t.weight
    if t.logit is not None:
        total = total + lse_scale * (t.logit - lse).exp() * t.slope
    return torch.where(valid, total, 0)


def statistics(active: Tensor | None, p: Side, n: Side) -> tuple[Tensor, ...]:
    """Valid positives and negatives, hardest negative, easiest and hardest positive of each anchor."""
    counts = (p.count, n.count) if active is None else (p.count * active, n.count * active)
    return (*counts, n.highest, p.highest, p.lowest)


def _empty_side(S: Tensor) -> Side:
    zero = S.new_zeros(S.shape[1])
    inf = torch.full_like(zero, torch.inf)
    return Side(inf, -inf, torch.zeros_like(zero, dtype=torch.int64), zero, zero.clone(), -inf)


def _sum_up(side: Side, t: Terms, valid: Tensor) -> None:
    side.count = (valid if not isinstance(t.slope, Tensor) else valid & (t.slope > 0)).sum(0)
    if t.value is not None:
        side.value = torch.where(valid, t.value, 0).sum(0)
        weight = t.weight if isinstance(t.weight, Tensor) else torch.full_like(t.value, t.weight)
        side.weight = torch.where(valid, weight, 0).sum(0)
    if t.logit is not None and len(valid):
        side.lse = torch.where(valid, t.logit, -torch.inf).logsumexp(0)
