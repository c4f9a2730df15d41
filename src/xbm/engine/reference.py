"""The oracle: the whole (m, M) matrix, the loss's plain formula, and autograd."""

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss, statistics
from xbm.engine.whole import whole


def compare(loss: Loss, anchors: Tensor, pairing: Pairing, stats: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, differentiable in the anchors and in the rows, and the five statistics."""
    wide = torch.promote_types(anchors.dtype, torch.float32)
    with torch.autocast(anchors.device.type, enabled=False):
        S = anchors.to(wide) @ pairing.rows.to(wide).T
        positive, negative = (mask.T for mask in pairing.masks())
        value = loss.dense(S, positive, negative).sum() / len(anchors)
        if not stats:
            return value, ()
        with torch.no_grad():
            found = whole(loss, S.T, positive.T, negative.T)
            return value, statistics(found.combined.active, found.p, found.n)
