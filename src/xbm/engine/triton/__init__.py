"""The GPU engine: a loss and its gradient in one pass over the bank, as Triton kernels; and what a memory does on a GPU.

It computes all eight losses (multi-similarity with mining only) on banks of float32, bfloat16 and float16.
`supports` tells what it can compute; everything else is left to the streaming engine. Nothing here synchronizes with the host.
The kernels check the values of their inputs: an unsound anchor adds nothing and is counted.

A step launches these kernels:

    contrastive, small sum   pass, finish                                       positives are found during the pass
    contrastive, otherwise   label_table, count, list, pass, finish             weights are known only at the end
    multi-similarity         label_table, count, list, pass, finish             positives decide which negatives are valid
    triplet                  label_table, count, list, pass, (overflow,) finish the weight of a negative is its rank
    all others               label_table, count, list, pass, finish             weights are known only at the end
    gradient of the rows     clean + the above + row_gradient
    batch against itself     clean + the above + row_gradient

The tensor cores multiply in the type of the rows: with a 16-bit bank, the anchors are rounded to it.
"""

from typing import Any

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Result
from xbm.engine.triton import plan
from xbm.engine.triton.bank_pass import compare_with_bank
from xbm.engine.triton.finish import clean_anchors, finish_step, gradient_of_rows
from xbm.engine.triton.memory_kernels import assign, descend, enqueue, newest_copies
from xbm.engine.triton.plan import KINDS, MAX_ANCHORS, MAX_COLUMNS, Case, capacity, loss_constants
from xbm.engine.triton.positives import Positives, list_positives, overflow_triplets
from xbm.kernels import on_device_of

from xbm.engine.triton.primitives import (  # isort: skip
    CONTRASTIVE_ONE_PASS, GIVEN_SLOT, NEWEST_SLOT, NO_SLOT, SAME_INDEX, TRIPLET, workspace_size,
)  # fmt: skip

__all__ = ["assign", "compare", "descend", "enqueue", "newest_copies", "supports"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# The losses (by `PairLoss.kernel`) whose kernels were compared with float64 on a GPU (benchmarks/gpu_check.py): those that
# engine="auto" runs there. The other kernels have run under the interpreter only, and need engine="triton".
CHECKED_ON_GPU = frozenset({"contrastive", "triplet", "multi_similarity"})


def supports(loss: Any, anchors: Tensor, rows: Tensor | None = None, references: Tensor | None = None) -> bool:
    """Whether the kernels can compute a loss of anchors against a memory's rows and references, or against each other."""
    banks = [bank for bank in (rows, references) if bank is not None] or [anchors]
    m, M, rows = anchors.shape[0], sum(bank.shape[0] for bank in banks), banks[0]
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
    return constants.kind != KINDS["triplet"] or not any(bank.requires_grad for bank in banks) or capacity(m, M) >= M


@on_device_of(1)
def compare(
    loss: Any, given: Tensor, pairing: Pairing, gradient: bool, row_gradient: bool, stats: bool, *,
    reference_gradient: bool = False,
) -> Result:  # fmt: skip
    """The mean loss of the given anchors (m, D) and, if requested, its gradients in the anchors, rows and references.

    In a batch, where the rows are the anchors, the gradient is that of their two roles together. References are copied in
    front of the bank, in its type.

    Args:
        gradient: whether the anchors' gradient is needed. It always comes, but within a batch its part as rows costs a pass.
        row_gradient: whether the gradient of the rows is needed.
    """
    if pairing.references is not None:
        live, bank = pairing.references, pairing.rows
        joint = pairing._replace(rows=torch.cat([live.to(bank.dtype), bank]), references=None)
        r = len(live)
        result = _compare(loss, given, joint, gradient, len(joint.rows) if row_gradient else r * reference_gradient, stats)
        of_rows = result.row_gradient
        return result._replace(
            reference_gradient=of_rows[:r] if of_rows is not None and reference_gradient else None,
            row_gradient=of_rows[r:] if of_rows is not None and row_gradient else None,
        )
    return _compare(loss, given, pairing, gradient, len(pairing.row_labels) * row_gradient, stats)


def _compare(loss: Any, given: Tensor, pairing: Pairing, gradient: bool, differentiated: int, stats: bool) -> Result:
    """The same for rows in one tensor, the first `differentiated` of which need a gradient."""
    constants, in_batch = loss_constants(loss), pairing.in_batch
    assert constants is not None, "supports() was not asked"
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
    row_gradient = differentiated > 0
    case = Case(
        constants, m, M, D, given.device, given.dtype, bank.dtype, stats, in_batch, gradient, row_gradient,
        ids is not None, sound is not None, row_ids is not None, exclude_slot, M <= plan.SMALL,
    )  # fmt: skip
    s = plan.settings(case)
    addresses = given.data_ptr() | bank.data_ptr() | stamps.data_ptr() | labels.data_ptr() | row_labels.data_ptr()
    for x in (ids, row_ids, own):
        if x is not None:
            addresses |= x.data_ptr()
    key = None if addresses % 16 else s.key  # without a key, Triton inspects alignments

    temperature = loss.temperature.float() if constants.learned else None
    anchors = given
    if in_batch or row_gradient:
        anchors, anchor_stamps = clean_anchors(case, s, key, given, ids, sound)
        if in_batch:
            bank, stamps = anchors, anchor_stamps
    pairs = (anchors, bank, row_labels, stamps, row_ids, labels, ids, own, pointer)
    workspace = torch.empty(workspace_size(m, s.plan.num_splits, D), dtype=torch.float32, device=given.device)
    positives = Positives() if s.kind == CONTRASTIVE_ONE_PASS.value else list_positives(case, s, key, pairs)
    pos_gradients = compare_with_bank(case, s, key, pairs, positives, workspace, temperature)
    overflow: tuple[Tensor | None, Tensor | None] = None, None
    if s.kind == TRIPLET.value and s.plan.capacity < M:
        overflow = overflow_triplets(case, s, key, pairs, positives)
    result = finish_step(case, s, key, given, pairs, latest, sound, positives, overflow, workspace, pos_gradients, temperature)
    if in_batch and gradient:
        return result._replace(
            gradient=gradient_of_rows(case, s, key, pairs, positives, workspace, temperature, result.gradient, M)
        )
    if row_gradient:
        of_rows = gradient_of_rows(case, s, key, pairs, positives, workspace, temperature, result.gradient, differentiated)
        return result._replace(row_gradient=of_rows)
    return result
