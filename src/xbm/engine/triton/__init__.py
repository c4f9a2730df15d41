"""The GPU engine: loss and gradient in one pass over the bank, as Triton kernels; and what a queue does there.

What it takes: contrastive, triplet and multi-similarity (with mining), banks of float32, bfloat16 and float16. `supports`
says so; everything else is left to the streaming engine. Nothing here waits for the device, and the values of
inputs are checked by the kernels as they go: an unsound anchor adds nothing and is counted.
"""

from typing import Any

import torch
from torch import Tensor

from xbm.checks import tolerance
from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss, from_spec, scaled
from xbm.engine.triton import assign as keyed
from xbm.engine.triton import enqueue as queue
from xbm.engine.triton.copies import newest_copies
from xbm.engine.triton.plan import MOST, WIDEST, capacity
from xbm.engine.triton.step import Found, step
from xbm.errors import InputError
from xbm.kernels.launch import INTERPRETED, Kernel, number, on_device_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(loss: Any, anchors: Tensor, rows: Tensor) -> bool:
    """Whether the kernels know the loss, the types and the sizes. Rows with a gradient, or the anchors: a batch."""
    m, M = anchors.shape[0], rows.shape[0]
    if (
        anchors.dtype not in TYPES
        or rows.dtype not in TYPES
        or not 0 < rows.shape[1] <= WIDEST
        or M >= 1 << 30
        or not 0 < m <= MOST
    ):
        return False
    if loss.name == "triplet":  # the gradient of the rows looks a positive's weight up in its list
        return not rows.requires_grad or capacity(m, M) >= M
    return loss.name == "contrastive" or (loss.name == "multi_similarity" and loss.mining)


def compare(loss: Any, anchors: Tensor, pairing: Pairing, stats: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mean loss, differentiable in the anchors and in the rows; five statistics and the number of unsound anchors."""
    in_batch = pairing.rows is anchors
    if torch.compiler.is_compiling():
        grad = torch.is_grad_enabled()
        wanted = grad and anchors.requires_grad, grad and not in_batch and pairing.rows.requires_grad
        value, _, _, counts, extremes, unsound = _as_node(loss, anchors, pairing, stats, in_batch, *wanted)
    else:
        found = _Compare.apply(anchors, None if in_batch else pairing.rows, pairing, loss, stats)
        if not stats:
            return found, ()
        value, counts, extremes, unsound = found
    return value, (*counts, *extremes, unsound) if stats else ()


def gradient(loss: Any, anchors: Tensor, pairing: Pairing, in_batch: bool) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient in the anchors, from one pass."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            value, found, *_ = _as_node(loss, anchors, pairing, False, in_batch, True, False)
            return value, found
        made = step(loss, anchors, pairing, False, in_batch, True, False)
    return made.loss, made.gradient


class _Compare(torch.autograd.Function):
    """The step in eager mode: a custom operator costs more host time than the kernels take."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, rows: Tensor | None, pairing: Pairing, loss: Loss, stats: bool
    ) -> Tensor | tuple[Tensor | None, ...]:
        of_anchors, of_rows = ctx.needs_input_grad[:2]
        found = step(loss, anchors, pairing, stats, rows is None, of_anchors, of_rows)
        # neither inputs nor outputs, so nothing has to be saved the slow way
        ctx.gradients = found.gradient, found.row_gradient
        if not stats:
            return found.loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.counts, found.extremes, found.unsound)
        return found.loss, found.counts, found.extremes, found.unsound

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None, None
        return (*_scaled(ctx, ctx.gradients, upstream), None, None, None)


def _scaled(ctx: Any, gradients: tuple[Tensor, Tensor | None], upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if torch.is_grad_enabled():
        raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
    of_anchors, of_rows = gradients
    for_anchors = scaled(of_anchors, upstream) if ctx.needs_input_grad[0] else None
    return for_anchors, scaled(of_rows, upstream) if of_rows is not None and ctx.needs_input_grad[1] else None


def _as_node(
    loss: Any, anchors: Tensor, pairing: Pairing, stats: bool, in_batch: bool, of_anchors: bool, of_rows: bool
) -> list[Tensor]:
    pointer, latest = pairing.latest or (None, None)
    return node(
        anchors, anchors.detach() if in_batch else pairing.rows, pairing.row_labels, pairing.stamps, pairing.labels,
        pairing.ids, pairing.row_ids, pairing.own, pointer, latest, loss.spec, stats, in_batch, of_anchors, of_rows,
    )  # fmt: skip


@torch.library.custom_op("xbm::triton_compare", mutates_args=())
def node(
    anchors: Tensor,
    rows: Tensor,
    row_labels: Tensor,
    stamps: Tensor,
    labels: Tensor,
    ids: Tensor | None,
    row_ids: Tensor | None,
    own: Tensor | None,
    pointer: Tensor | None,
    latest: Tensor | None,
    spec: str,
    stats: bool,
    in_batch: bool,
    gradients: bool,
    row_gradient: bool,
) -> list[Tensor]:
    """The step as one graph node, for torch.compile. What was not asked for comes back empty."""
    newest = None if pointer is None or latest is None else (pointer, latest)
    pairing = Pairing(rows.detach(), row_labels, stamps, labels, None, ids, row_ids, own, newest)
    with torch.no_grad():
        found: Found = step(from_spec(spec), anchors.detach(), pairing, stats, in_batch, gradients, row_gradient)
    none = anchors.new_empty(0)
    return [found.loss, found.gradient, *(none.clone() if x is None else x for x in found[2:])]


@node.register_fake
def _(anchors, rows, row_labels, stamps, labels, ids, row_ids, own, pointer, latest, spec, stats, *flags):  # type: ignore[no-untyped-def]
    m, row_gradient = anchors.shape[0], flags[-1]
    counts = labels.new_empty((2, m)) if stats else anchors.new_empty(0)
    extremes = anchors.new_empty((3, m), dtype=torch.float32) if stats else anchors.new_empty(0)
    of_rows = torch.empty_like(rows) if row_gradient else anchors.new_empty(0)
    unsound = labels.new_empty(()) if stats else anchors.new_empty(0)
    loss = anchors.new_empty((), dtype=torch.float32)
    return [loss, anchors.new_empty(anchors.shape), of_rows, counts, extremes, unsound]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    return (*_scaled(ctx, ctx.saved_tensors, grads[0]), *[None] * 13)


node.register_autograd(_backward, setup_context=_setup)

_enqueue = Kernel(queue.enqueue, overlap=True)


def enqueue(
    embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None,
    rows: Tensor, row_labels: Tensor, row_ids: Tensor, stamps: Tensor,
    pointer: Tensor, count: Tensor, clock: Tensor, latest: Tensor, unsound: Tensor,
) -> None:  # fmt: skip
    """A queue's enqueue in one kernel: sound rows go to the next slots, unsound ones are counted."""
    buffers = (rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound)
    if torch.compiler.is_compiling():
        enqueue_node(embeddings, labels, ids, mask, *buffers)
    else:
        _write(embeddings, labels, ids, mask, *buffers)
        torch.autograd.graph.increment_version(buffers)  # or autograd would not notice that what it saved has changed


@on_device_of(4)
def _write(embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None, rows: Tensor, *buffers: Tensor) -> None:
    (m, D), size = embeddings.shape, rows.shape[0]
    key = number(rows.device, m, size, D, embeddings.dtype, rows.dtype, ids is not None, mask is not None)
    given = [x if x is None else x.contiguous() for x in (embeddings, labels, ids, mask)]
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in (*given, rows, *buffers))
    _enqueue(
        key if aligned else None, (1, 1, 1), 16, 1, *given, rows, *buffers, m, size, tolerance(embeddings.dtype),
        D, 32, 256, ids is not None, mask is not None, m > size,
    )  # fmt: skip
    return None


@torch.library.custom_op(
    "xbm::triton_enqueue",
    mutates_args=("rows", "row_labels", "row_ids", "stamps", "pointer", "count", "clock", "latest", "unsound"),
)
def enqueue_node(
    embeddings: Tensor,
    labels: Tensor,
    ids: Tensor | None,
    mask: Tensor | None,
    rows: Tensor,
    row_labels: Tensor,
    row_ids: Tensor,
    stamps: Tensor,
    pointer: Tensor,
    count: Tensor,
    clock: Tensor,
    latest: Tensor,
    unsound: Tensor,
) -> None:
    """The enqueue as one graph node, for torch.compile."""
    _write(embeddings, labels, ids, mask, rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound)


@enqueue_node.register_fake
def _(embeddings, labels, ids, mask, rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound):  # type: ignore[no-untyped-def]
    return None


_assign, _tally, _descend = (Kernel(each, overlap=True) for each in (keyed.assign, keyed.tally, keyed.descend))


@on_device_of(4)
def assign(
    embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None,
    rows: Tensor, row_labels: Tensor, row_ids: Tensor, stamps: Tensor, count: Tensor, clock: Tensor, unsound: Tensor,
    momentum: float,
) -> None:  # fmt: skip
    """The keyed enqueue in two kernels: sound rows go to the slots of their ids, mixed with what is there."""
    (m, D), size = embeddings.shape, rows.shape[0]
    became = torch.empty(m, dtype=torch.int32, device=rows.device)
    given = [x if x is None else x.contiguous() for x in (embeddings, labels, ids, mask)]
    buffers = (rows, row_labels, row_ids, stamps, clock, count, unsound)
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in (*given, *buffers))
    key = number("assign", rows.device, D, embeddings.dtype, rows.dtype, mask is not None, momentum) if aligned else None
    _assign(
        key, (m, 1, 1), 4, 1, *given, rows, row_labels, row_ids, stamps, clock, became, m, size, tolerance(embeddings.dtype),
        momentum, D, 32, 256, mask is not None, momentum > 0,
    )  # fmt: skip
    _tally(key, (1, 1, 1), 4, 1, became, count, clock, unsound, m, 1024)
    torch.autograd.graph.increment_version(buffers)


@on_device_of(0)
def descend(rows: Tensor, gradient: Tensor, alpha: float) -> None:
    """v ← normalise(v − α ∂L/∂v) for every row that has a gradient."""
    (M, D), gradient = rows.shape, gradient.contiguous()
    aligned = rows.data_ptr() % 16 == 0 and gradient.data_ptr() % 16 == 0
    key = number("descend", rows.device, D, rows.dtype, gradient.dtype, alpha) if aligned else None
    _descend(key, (M, 1, 1), 4, 1, rows, gradient, alpha, D, 512)
    torch.autograd.graph.increment_version((rows,))


__all__ = ["INTERPRETED", "assign", "compare", "descend", "enqueue", "gradient", "newest_copies", "supports"]
