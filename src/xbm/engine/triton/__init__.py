"""The GPU engine: a loss and its gradient in one pass over the bank, as Triton kernels; and what a memory does on a GPU.

It computes the contrastive, triplet and multi-similarity (with mining) losses on banks of float32, bfloat16 and float16.
`supports` tells what it can compute; everything else is left to the streaming engine. Nothing here synchronizes with the host.
The kernels check the values of their inputs: an unsound anchor adds nothing and is counted.

A step launches these kernels:

    contrastive, small sum   pass, finish                                       positives are found during the pass
    contrastive, otherwise   label_table, count, list, pass, finish             weights are known only at the end
    multi-similarity         label_table, count, list, pass, finish             positives decide which negatives are valid
    triplet                  label_table, count, list, pass, (overflow,) finish the weight of a negative is its rank
    gradient of the rows     clean + the above + row_gradient
    batch against itself     clean + the above + row_gradient

The tensor cores multiply in the type of the rows: with a 16-bit bank, the anchors are rounded to it.
"""

from typing import Any

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import scaled
from xbm.engine.triton import plan
from xbm.engine.triton.bank_pass import compare_with_bank
from xbm.engine.triton.finish import Results, finish_step
from xbm.engine.triton.memory_kernels import assign, descend, enqueue, newest_copies
from xbm.engine.triton.plan import KINDS, MAX_ANCHORS, MAX_COLUMNS, Case, LossConstants, capacity, loss_constants
from xbm.engine.triton.positives import list_positives, overflow_triplets
from xbm.engine.triton.row_gradient import clean_anchors, gradient_of_rows
from xbm.errors import InputError
from xbm.kernels import INTERPRETED, on_device_of

from xbm.engine.triton.primitives import (  # isort: skip
    CONTRASTIVE_ONE_PASS, GIVEN_SLOT, NEWEST_SLOT, NO_SLOT, SAME_INDEX, TRIPLET, workspace_size,
)  # fmt: skip

__all__ = ["INTERPRETED", "assign", "compare", "descend", "enqueue", "gradient", "newest_copies", "supports"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(loss: Any, anchors: Tensor, rows: Tensor) -> bool:
    """Whether the kernels can compute a loss for these types and sizes."""
    m, M = anchors.shape[0], rows.shape[0]
    if (
        anchors.dtype not in TYPES
        or rows.dtype not in TYPES
        or not 0 < rows.shape[1] <= MAX_COLUMNS
        or M >= 1 << 30
        or not 0 < m <= MAX_ANCHORS
    ):
        return False
    constants = loss_constants(loss)
    if constants is None:
        return False
    # the gradient of the rows looks up the weight of a triplet's positive in its list
    return constants.kind != KINDS["triplet"] or not rows.requires_grad or capacity(m, M) >= M


def compare(loss: Any, anchors: Tensor, pairing: Pairing, stats: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mean loss, differentiable in the anchors and in the rows; five statistics and the number of unsound anchors."""
    in_batch = pairing.rows is anchors
    if torch.compiler.is_compiling():
        grad = torch.is_grad_enabled()
        wanted = grad and anchors.requires_grad, grad and not in_batch and pairing.rows.requires_grad
        value, _, _, counts, extremes, unsound = _call_op(loss, anchors, pairing, stats, in_batch, *wanted)
    else:
        outputs = _Compare.apply(anchors, None if in_batch else pairing.rows, pairing, loss, stats)
        if not stats:
            return outputs, ()
        value, counts, extremes, unsound = outputs
    return value, (*counts, *extremes, unsound) if stats else ()


def gradient(loss: Any, anchors: Tensor, pairing: Pairing, in_batch: bool) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient in the anchors, from one pass."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            value, anchor_gradient, *_ = _call_op(loss, anchors, pairing, False, in_batch, True, False)
            return value, anchor_gradient
        results = launch_step(_constants(loss), anchors, pairing, False, in_batch, True, False)
    return results.loss, results.gradient


def _constants(loss: Any) -> LossConstants:
    constants = loss_constants(loss)
    assert constants is not None, "supports() was not asked"
    return constants


class _Compare(torch.autograd.Function):
    """The step in eager mode: a custom operator costs more host time than the kernels take."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, rows: Tensor | None, pairing: Pairing, loss: Any, stats: bool
    ) -> Tensor | tuple[Tensor | None, ...]:
        results = launch_step(_constants(loss), anchors, pairing, stats, rows is None, *ctx.needs_input_grad[:2])
        # neither inputs nor outputs, so they need not pass through save_for_backward, which is slow
        ctx.gradients = results.gradient, results.row_gradient
        if not stats:
            return results.loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.counts, results.extremes, results.unsound)
        return results.loss, results.counts, results.extremes, results.unsound

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None, None
        return (*_scaled_gradients(ctx, ctx.gradients, upstream), None, None, None)


def _scaled_gradients(
    ctx: Any, gradients: tuple[Tensor, Tensor | None], upstream: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    if torch.is_grad_enabled():
        raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
    needed = (x if needs else None for x, needs in zip(gradients, ctx.needs_input_grad))
    of_anchors, of_rows = (x if x is None else scaled(x, upstream) for x in needed)
    return of_anchors, of_rows


def _call_op(
    loss: Any, anchors: Tensor, pairing: Pairing, stats: bool, in_batch: bool, gradients: bool, row_gradient: bool
) -> list[Tensor]:
    return compare_op(
        anchors, anchors.detach() if in_batch else pairing.rows, pairing.row_labels, pairing.stamps, pairing.labels,
        pairing.ids, pairing.row_ids, pairing.own, *(pairing.latest or (None, None)), *_constants(loss),
        stats, in_batch, gradients, row_gradient,
    )  # fmt: skip


@torch.library.custom_op("xbm::triton_compare", mutates_args=())
def compare_op(
    anchors: Tensor, rows: Tensor, row_labels: Tensor, stamps: Tensor, labels: Tensor,
    ids: Tensor | None, row_ids: Tensor | None, own: Tensor | None, pointer: Tensor | None, latest: Tensor | None,
    kind: int, reduction: int, margin: float, alpha: float, beta: float, base: float,
    stats: bool, in_batch: bool, gradients: bool, row_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """The step as one graph node, for torch.compile. Results that were not asked for are empty."""
    newest = None if pointer is None or latest is None else (pointer, latest)
    pairing = Pairing(rows.detach(), row_labels, stamps, labels, None, ids, row_ids, own, newest)
    constants = LossConstants(kind, reduction, margin, alpha, beta, base)
    with torch.no_grad():
        results = launch_step(constants, anchors.detach(), pairing, stats, in_batch, gradients, row_gradient)
    return [anchors.new_empty(0) if x is None else x for x in results]


@compare_op.register_fake
def _(anchors, rows, row_labels, stamps, labels, *options):  # type: ignore[no-untyped-def]
    (stats, _, _, row_gradient), m, empty = options[-4:], anchors.shape[0], anchors.new_empty
    loss = empty((), dtype=torch.float32)
    of_rows = torch.empty_like(rows) if row_gradient else empty(0)
    if not stats:
        return [loss, empty(anchors.shape), of_rows, empty(0), empty(0), empty(0)]
    counts, extremes, unsound = labels.new_empty((2, m)), empty((3, m), dtype=torch.float32), labels.new_empty(())
    return [loss, empty(anchors.shape), of_rows, counts, extremes, unsound]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    return (*_scaled_gradients(ctx, ctx.saved_tensors, grads[0]), *[None] * 18)


compare_op.register_autograd(_backward, setup_context=_setup_context)


@on_device_of(1)
def launch_step(
    constants: LossConstants, given: Tensor, pairing: Pairing, stats: bool, in_batch: bool, gradients: bool, row_gradient: bool
) -> Results:
    """Launches the kernels of a step.

    Args:
        given: (m, D), the anchors.
        in_batch: whether the rows are the anchors.
        gradients: whether the anchors' gradient is needed. It always comes, but within a batch its part as rows costs a pass.
        row_gradient: whether the gradient of the rows is needed.
    """
    given, bank, labels = given.contiguous(), pairing.rows.contiguous(), pairing.labels.contiguous()
    row_labels, stamps = pairing.row_labels.contiguous(), pairing.stamps.contiguous()
    ids, row_ids, own = (x if x is None else x.contiguous() for x in (pairing.ids, pairing.row_ids, pairing.own))
    pointer, latest = pairing.latest or (None, None)
    (m, D), M, sound = given.shape, row_labels.shape[0], pairing.sound
    exclude_slot = NO_SLOT.value
    if own is not None:
        exclude_slot = GIVEN_SLOT.value
    elif latest is not None:
        exclude_slot = NEWEST_SLOT.value
    elif in_batch and row_ids is None:
        exclude_slot = SAME_INDEX.value
    case = Case(
        constants, m, M, D, given.device, given.dtype, bank.dtype, stats, in_batch, gradients, row_gradient,
        ids is not None, sound is not None, row_ids is not None, exclude_slot, M <= plan.SMALL,
    )  # fmt: skip
    s = plan.settings(case)
    addresses = given.data_ptr() | bank.data_ptr() | stamps.data_ptr() | labels.data_ptr() | row_labels.data_ptr()
    for x in (ids, row_ids, own):
        if x is not None:
            addresses |= x.data_ptr()
    key = None if addresses % 16 else s.key  # without a key, Triton inspects alignments

    anchors = given
    if in_batch or row_gradient:
        anchors, anchor_stamps = clean_anchors(case, s, key, given, ids, sound)
        if in_batch:
            bank, stamps = anchors, anchor_stamps
    pairs = (anchors, bank, row_labels, stamps, row_ids, labels, ids, own, pointer)
    workspace = torch.empty(workspace_size(m, s.plan.num_splits, D), dtype=torch.float32, device=given.device)
    positives, overflow = None, None
    if s.kind != CONTRASTIVE_ONE_PASS.value:
        positives = list_positives(case, s, key, pairs)
    pos_gradients = compare_with_bank(case, s, key, pairs, positives, workspace)
    if s.kind == TRIPLET.value and positives is not None and s.plan.capacity < M:
        overflow = overflow_triplets(case, s, key, pairs, positives)
    results = finish_step(case, s, key, given, pairs, latest, sound, positives, overflow, workspace, pos_gradients)
    if in_batch and gradients:
        whole = gradient_of_rows(case, s, key, pairs, positives, workspace, results.gradient, given.dtype, True)
        return results._replace(gradient=whole)
    if row_gradient:
        of_rows = gradient_of_rows(case, s, key, pairs, positives, workspace, results.gradient, bank.dtype, False)
        return results._replace(row_gradient=of_rows)
    return results
