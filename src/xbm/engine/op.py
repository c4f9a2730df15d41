"""The streaming engine as one graph node: under torch.compile its data-dependent shapes stay inside."""

import torch
from torch import Tensor

from xbm.engine import streaming
from xbm.engine.pairing import Pairing
from xbm.engine.terms import from_spec, scaled
from xbm.errors import InputError


@torch.library.custom_op("xbm::stream", mutates_args=())
def stream(
    anchors: Tensor,
    rows: Tensor,
    row_labels: Tensor,
    stamps: Tensor,
    labels: Tensor,
    sound: Tensor,
    ids: Tensor | None,
    row_ids: Tensor | None,
    own: Tensor | None,
    spec: str,
    row_gradient: bool,
    stats: bool,
) -> list[Tensor]:
    """The loss, its gradients in anchors and rows (empty unless asked for), and five statistics."""
    pairing = Pairing(rows.detach(), row_labels, stamps, labels, sound, ids, row_ids, own)
    with torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
        found = streaming.compare(from_spec(spec), anchors.detach(), pairing, row_gradient, stats)
        m = len(anchors)
        of_rows = anchors.new_empty(0) if found.row_gradient is None else (found.row_gradient / m).to(rows.dtype)
        gradient = (found.gradient / m).to(anchors.dtype).contiguous()
        # a statistic may be a view of an input or of another output: a graph node must hand out fresh tensors
        return [found.loss.sum() / m, gradient, of_rows, *(x.clone() for x in found.statistics)]


@stream.register_fake
def _(anchors, rows, row_labels, stamps, labels, sound, ids, row_ids, own, spec, row_gradient, stats):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(anchors.dtype, torch.float32)
    m = anchors.shape[0]
    counts = [labels.new_empty(m, dtype=torch.int64) for _ in range(2)]
    extremes = [anchors.new_empty(m, dtype=wide) for _ in range(3)]
    of_rows = torch.empty_like(rows) if row_gradient else anchors.new_empty(0)
    return [anchors.new_empty((), dtype=wide), anchors.new_empty(anchors.shape), of_rows, *counts, *extremes]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx, grads):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
    gradient, of_rows = ctx.saved_tensors
    upstream = grads[0]
    for_rows = scaled(of_rows, upstream) if ctx.needs_input_grad[1] else None
    return scaled(gradient, upstream), for_rows, *[None] * 10


stream.register_autograd(_backward, setup_context=_setup)
