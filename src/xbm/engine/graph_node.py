"""A loss call as one node of a graph that torch.compile makes."""

import itertools
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss
from xbm.errors import InputError

_handles = itertools.count()
_losses: WeakValueDictionary[int, Loss] = WeakValueDictionary()


def new_handle(loss: Loss) -> int:
    """A number under which compiled graphs find the loss, for as long as it lives."""
    handle = next(_handles)
    _losses[handle] = loss
    return handle


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """A gradient times the upstream gradient, which may be a loss scale that float16 cannot represent."""
    if gradient.dtype == torch.float16:
        return (gradient.float() * upstream).to(gradient.dtype)
    return gradient * upstream


def one_pass_node(
    loss: Loss,
    anchors: Tensor,
    rows: Tensor | None,
    p: Pairing,
    kernels: bool,
    gradient: bool,
    row_gradient: bool,
    stats: bool,
) -> list[Tensor]:
    """Loss, gradients, five statistics and the number of unsound anchors, as one node of a compiled graph.

    Args:
        rows: the rows of the pairing, or None if they are the anchors and have no gradient of their own.
    """
    pointer, latest = p.latest or (None, None)
    return one_pass(
        anchors, rows, p.row_labels, p.stamps, p.labels, p.sound, p.ids, p.row_ids, p.own, pointer, latest, p.in_batch,
        loss.handle, kernels, gradient, row_gradient, stats,
    )  # fmt: skip


@torch.library.custom_op("xbm::one_pass", mutates_args=())
def one_pass(
    anchors: Tensor,
    rows: Tensor | None,
    row_labels: Tensor,
    stamps: Tensor,
    labels: Tensor,
    sound: Tensor | None,
    ids: Tensor | None,
    row_ids: Tensor | None,
    own: Tensor | None,
    pointer: Tensor | None,
    latest: Tensor | None,
    in_batch: bool,
    loss: int,
    kernels: bool,
    gradient: bool,
    row_gradient: bool,
    stats: bool,
) -> list[Tensor]:
    """A one-pass engine as an operator: its data-dependent shapes stay inside. What was not requested comes back empty.

    A graph takes no objects, so the loss is passed as its handle. It is looked up when the node runs, with the
    hyper-parameters that it has then.
    """
    engine = import_module("xbm.engine.triton" if kernels else "xbm.engine.streaming")
    newest = None if pointer is None or latest is None else (pointer, latest)
    bank = anchors.detach() if rows is None else rows.detach()
    pairing = Pairing(bank, row_labels, stamps, labels, sound, ids, row_ids, own, newest, in_batch)
    with torch.no_grad():
        result = engine.compare(_losses[loss], anchors.detach(), pairing, gradient, row_gradient, stats)
    none = anchors.new_empty(0)
    # a statistic may be a view of an input or of another output, but a graph node must return fresh tensors
    statistics = [x.clone() for x in result.statistics] if stats else [none.clone() for _ in range(5)]
    of_rows = none.clone() if result.row_gradient is None or rows is None else result.row_gradient.to(rows.dtype)
    unsound = none.clone() if result.unsound is None or not stats else result.unsound
    return [result.loss, result.gradient.to(anchors.dtype).contiguous(), of_rows, *statistics, unsound]


@one_pass.register_fake
def _(  # type: ignore[no-untyped-def]
    anchors, rows, row_labels, stamps, labels, sound, ids, row_ids, own, pointer, latest, in_batch, loss, kernels,
    gradient, row_gradient, stats,
):  # fmt: skip
    wide = torch.promote_types(anchors.dtype, torch.float32)
    m, none = anchors.shape[0], anchors.new_empty(0)
    statistics = [none.clone() for _ in range(5)]
    if stats:
        statistics = [labels.new_empty(m, dtype=torch.int64) for _ in range(2)]
        statistics += [anchors.new_empty(m, dtype=wide) for _ in range(3)]
    of_rows = torch.empty_like(rows) if row_gradient and rows is not None else none.clone()
    unsound = labels.new_empty(()) if kernels and stats else none.clone()
    return [anchors.new_empty((), dtype=wide), anchors.new_empty(anchors.shape), of_rows, *statistics, unsound]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
    gradient, of_rows = ctx.saved_tensors
    for_anchors = scaled(gradient, grads[0]) if ctx.needs_input_grad[0] else None
    return for_anchors, scaled(of_rows, grads[0]) if ctx.needs_input_grad[1] else None, *[None] * 15


one_pass.register_autograd(_backward, setup_context=_setup)
