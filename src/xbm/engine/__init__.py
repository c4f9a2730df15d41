"""How anchors meet the bank: one front door, several engines, one oracle. `auto` picks by measurement."""

import torch
from torch import Tensor

from xbm.engine import reference
from xbm.engine.op import stream
from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss
from xbm.engine.whole import whole
from xbm.errors import InputError

ENGINES = ("auto", "reference", "streaming", "triton")


def compare(loss: Loss, anchors: Tensor, pairing: Pairing, engine: str, stats: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mean loss over the anchors and, if asked for, the statistics of their pairs."""
    if len(anchors) == 0:
        none = pairing.labels.new_zeros(0)
        real = anchors.new_zeros(0)
        return anchors.sum() * 0, (none, none, real, real, real)
    if engine == "triton":
        raise InputError('the triton engine is not built yet: use engine="auto"')
    if anchors.device.type != "cpu":  # there an unsound anchor could not be refused; it must not spread NaN
        kept = torch.where(pairing.sound[:, None], anchors, 0)
        pairing = pairing._replace(rows=kept if pairing.rows is anchors else pairing.rows)
        anchors = kept
    if engine == "reference":
        return reference.compare(loss, anchors, pairing, stats)
    row_gradient = pairing.rows.requires_grad and torch.is_grad_enabled()
    value, _, _, *statistics = stream(anchors, *pairing_inputs(pairing), loss.spec, row_gradient, stats)
    return value, tuple(statistics)


def pairing_inputs(p: Pairing) -> tuple[Tensor | None, ...]:
    return p.rows, p.row_labels, p.stamps, p.labels, p.sound, p.ids, p.row_ids, p.own


def dense_weights(loss: Loss, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """(m, M): the GPW weights of a whole similarity matrix."""
    with torch.no_grad():
        found = whole(loss, S.T, positive.T, negative.T)
        return (found.positive_weights + found.negative_weights).T


__all__ = ["ENGINES", "Pairing", "compare", "dense_weights"]
