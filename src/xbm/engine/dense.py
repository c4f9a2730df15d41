"""Every pair at once, from a whole similarity matrix: the reference engine, the GPW weights, and small problems."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Combined, Loss, Side, Terms
from xbm.errors import InputError


def reference(loss: Loss, anchors: Tensor, pairing: Pairing, stats: bool) -> tuple[Tensor, ...]:
    """The reference engine: the loss's plain formula on the (m, M) matrix, differentiated by autograd; and the statistics."""
    assert pairing.sound is not None
    wide = torch.promote_types(anchors.dtype, torch.float32)
    with torch.autocast(anchors.device.type, enabled=False):
        if anchors.device.type != "cpu":  # an unsound anchor could not raise there; it must not spread NaN
            anchors = torch.where(pairing.sound[:, None], anchors, 0)
        # a copy, because autograd reads the rows again in the backward pass: the memory may be written to before that
        rows = anchors if pairing.in_batch else pairing.rows.clone()
        S = anchors.to(wide) @ rows.to(wide).T
        if pairing.references is not None:
            S = torch.cat([anchors.to(wide) @ pairing.references.to(wide).T, S], dim=1)
        positive, negative = (mask.T for mask in pairing.masks())
        if S.shape[1] == 0:  # a formula may take the maximum of a row: one column that is no pair
            S, positive, negative = (F.pad(x, (0, 1)) for x in (S, positive, negative))
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
    repulsion = _terms(loss.negative(seen, p, lambda x: x), loss, "negative") if len(S) else Terms()
    _sum_up(n, repulsion, valid_negative)
    attraction = Terms()
    if order is not None:
        assert repulsion.beaten is not None
        p.beaten = repulsion.beaten
        weight = torch.zeros_like(S).scatter(0, order, p.beaten.to(S.dtype))
        attraction = Terms(value=torch.zeros_like(S), weight=weight, valid=weight > 0)
    elif len(S):
        attraction = _terms(loss.positive(S, n, lambda x: x), loss, "positive")
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
    return torch.where(valid, total, 0).to(lse.dtype)  # a weight such as torch.where(s < 1, 1.0, 0.0) is float32


def statistics(active: Tensor | None, p: Side, n: Side) -> tuple[Tensor, ...]:
    """Valid positives and negatives, hardest negative, easiest and hardest positive of each anchor."""
    counts = (p.count, n.count) if active is None else (p.count * active, n.count * active)
    return (*counts, n.highest, p.highest, p.lowest)


def _terms(given: object, loss: Loss, name: str) -> Terms:
    if not isinstance(given, Terms):
        raise InputError(
            f"{type(loss).__name__}.{name} returned {type(given).__name__}: return Terms(value=..., weight=...), or "
            "Terms(logit=..., slope=...)"
        )
    return given


def _empty_side(S: Tensor) -> Side:
    zero = S.new_zeros(S.shape[1])
    inf = torch.full_like(zero, torch.inf)
    return Side(inf, -inf, torch.zeros_like(zero, dtype=torch.int64), zero, zero.clone(), -inf)


def _sum_up(side: Side, t: Terms, valid: Tensor) -> None:
    # not slope > 0: a slope of NaN must reach the loss, not empty the side
    side.count = (valid & ~(t.slope <= 0) if isinstance(t.slope, Tensor) else valid).sum(0)
    if t.value is not None:
        side.value = torch.where(valid, t.value, 0).sum(0)
        weight = torch.as_tensor(t.weight, dtype=t.value.dtype, device=t.value.device)
        side.weight = torch.where(valid, weight, 0).sum(0)
    if t.logit is not None and len(valid):
        side.lse = torch.where(valid, t.logit, -torch.inf).logsumexp(0)
