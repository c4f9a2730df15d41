"""How anchors meet the bank: one front door, several engines, one oracle. `auto` picks by measurement."""

import torch
from torch import Tensor

from xbm.engine import reference
from xbm.engine.op import stream
from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss
from xbm.engine.whole import whole
from xbm.errors import InputError
from xbm.kernels import HAS_TRITON, INTERPRETED, has_kernels

ENGINES = ("auto", "reference", "streaming", "triton")


def chosen(loss: Loss, anchors: Tensor, rows: Tensor, engine: str) -> str:
    """The engine that will run: on a GPU the kernels, for what they know; else the streaming engine."""
    if engine in ("reference", "streaming"):
        return engine
    if has_kernels(anchors.device) or (HAS_TRITON and INTERPRETED and engine == "triton"):
        from xbm.engine import triton

        if triton.supports(loss, anchors, rows):
            return "triton"
    elif engine == "triton":
        raise InputError('engine="triton" needs anchors on an NVIDIA GPU of compute capability 8.0 or later: use engine="auto"')
    return "streaming"


def compare(loss: Loss, anchors: Tensor, pairing: Pairing, engine: str, stats: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mean loss over the anchors and, if asked for, the five statistics of their pairs.

    Where the pairing leaves it to the engine to look which anchors are sound, their number comes as a sixth.
    """
    if anchors.shape[0] == 0:
        none = pairing.labels.new_zeros(0)
        real = anchors.new_zeros(0)
        return anchors.sum() * 0, (none, none, real, real, real)
    if pairing.sound is None or chosen(loss, anchors, pairing.rows, engine) == "triton":
        from xbm.engine import triton

        return triton.compare(loss, anchors, pairing, stats)
    if anchors.device.type != "cpu":  # there an unsound anchor could not be refused; it must not spread NaN
        kept = torch.where(pairing.sound[:, None], anchors, 0)
        pairing = pairing._replace(rows=kept if pairing.rows is anchors else pairing.rows)
        anchors = kept
    if engine == "reference":
        return reference.compare(loss, anchors, pairing, stats)
    row_gradient = pairing.rows.requires_grad and torch.is_grad_enabled()
    value, _, _, *statistics = stream(anchors, *pairing_inputs(pairing), loss.spec, row_gradient, stats)
    return value, tuple(statistics)


def gradient(loss: Loss, anchors: Tensor, pairing: Pairing, engine: str) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient in the anchors, outside autograd."""
    in_batch = pairing.rows is anchors
    if pairing.sound is None and anchors.shape[0]:
        from xbm.engine import triton

        return triton.gradient(loss, anchors.detach(), pairing, in_batch)
    with torch.enable_grad():
        leaf = anchors.detach().requires_grad_()
        value, _ = compare(loss, leaf, pairing._replace(rows=leaf) if in_batch else pairing, engine, False)
        (found,) = torch.autograd.grad(value, leaf)
    return value.detach(), found


def pairing_inputs(p: Pairing) -> tuple[Tensor | None, ...]:
    return p.rows, p.row_labels, p.stamps, p.labels, p.sound, p.ids, p.row_ids, p.own


def dense_weights(loss: Loss, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """(m, M): the GPW weights of a whole similarity matrix."""
    with torch.no_grad():
        found = whole(loss, S.T, positive.T, negative.T)
        return (found.positive_weights + found.negative_weights).T


__all__ = ["ENGINES", "Pairing", "chosen", "compare", "dense_weights", "gradient"]
