# mypy: disable-error-code="no-untyped-def"
"""The gradient with respect to the rows, once every anchor's coefficients are known: ∂L/∂v_j = Σ_i w_ij·a_i.

Used by memories that are updated by back-propagation, and for a batch compared with itself, where the rows are the anchors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.engine.triton.loss_formulas import distance, inverse_temperature, negative_logits, negative_slopes, weigh_positives
from xbm.engine.triton.plan import Case, Settings
from xbm.engine.triton.positives import Positives
from xbm.kernels import Kernel

from xbm.engine.triton.primitives import (  # isort: skip
    CEILING, FLOOR, INF, MARGIN, MULTI_SIMILARITY, NEGATIVE_PEAK, NEGATIVE_WEIGHT, POSITIVE_PEAK, POSITIVE_WEIGHT, SIZES,
    SUP_CON, TRIPLET,
    block_similarities, candidate_mask, is_sound, results_ptr, self_slots, wait_for_previous,
)  # fmt: skip


@triton.jit
def clean_kernel(
    given, ids, given_sound,
    cleaned, stamps,  # out: (m, D), zeros for an unsound anchor; (m,), -1 for it
    tolerance, D: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    anchor = tl.program_id(0)
    sound = is_sound(given, anchor, ids, given_sound, tolerance, D, HAS_IDS, HAS_SOUND, BLOCK_K)
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        offs = anchor.to(tl.int64) * D + offs_k
        x = tl.load(given + offs, mask=offs_k < D, other=0.0)
        tl.store(cleaned + offs, tl.where(sound, x, 0.0).to(cleaned.dtype.element_ty), mask=offs_k < D)
    tl.store(stamps + anchor, tl.where(sound, 0, -1).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def row_gradient_kernel(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    pos_counts, pos_sims, pos_rows, violations, workspace, temperature,
    gradient,  # (m, D), added if the rows are the anchors
    row_gradient,  # out: (M, D)
    m, M, num_splits, capacity, margin, alpha, beta, base,
    KIND: tl.constexpr, ADD: tl.constexpr, EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < M
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_label = tl.load(row_labels + offs_n, mask=mask_n, other=0)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    beta = inverse_temperature(temperature, beta)
    results = results_ptr(workspace, m, num_splits, D)
    for start in range(0, m, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        clamped_m = tl.minimum(offs_m, m - 1)
        anchor_ids = tl.load(ids + clamped_m) if EXCLUDE_ID else tl.load(labels + clamped_m)
        slots = self_slots(own, pointer, clamped_m, m, M, EXCLUDE_SLOT)
        same = row_label[None, :] == tl.load(labels + clamped_m)[:, None]
        mask = candidate_mask(offs_n, mask_n, stamps, row_ids, anchor_ids, slots, EXCLUDE_ID, EXCLUDE_SLOT)
        mask = mask & (offs_m < m)[:, None]
        S = block_similarities(anchors, rows, clamped_m, offs_n, offs_m < m, mask_n, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        negative_weight = tl.load(results + NEGATIVE_WEIGHT * m + clamped_m)[:, None]
        positive_weight = tl.load(results + POSITIVE_WEIGHT * m + clamped_m)[:, None]
        above_floor = mask & (tl.load(results + FLOOR * m + clamped_m)[:, None] < S)
        if KIND == MULTI_SIMILARITY:
            peak = tl.load(results + NEGATIVE_PEAK * m + clamped_m)[:, None]
            negative = negative_weight * tl.exp(tl.where(above_floor, beta * (S - base) - peak, -INF))
            peak = tl.load(results + POSITIVE_PEAK * m + clamped_m)[:, None]
            below_ceiling = mask & (tl.load(results + CEILING * m + clamped_m)[:, None] > S)
            positive = positive_weight * tl.exp(tl.where(below_ceiling, -alpha * (S - base) - peak, -INF))
        elif KIND >= MARGIN:
            if KIND == MARGIN:
                negative = negative_weight * tl.where(above_floor, distance(S)[1], 0.0)
            else:
                peak = tl.load(results + NEGATIVE_PEAK * m + clamped_m)[:, None]
                exponentials = tl.exp(tl.where(above_floor, negative_logits(S, beta, base, KIND) - peak, -INF))
                negative = negative_weight * negative_slopes(exponentials, S, base, KIND)
            peak = tl.load(results + POSITIVE_PEAK * m + clamped_m)[:, None]
            positive = positive_weight * weigh_positives(S, mask & same, INF, peak, alpha, beta, base, KIND)[1]
            if KIND == SUP_CON:
                positive -= negative
        elif KIND == TRIPLET:
            num_positives = tl.where(offs_m < m, tl.load(pos_counts + clamped_m), 0)
            negative = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            positive = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, tl.max(num_positives, 0)):
                listed = k < num_positives
                sims = tl.load(pos_sims + clamped_m * capacity + k, mask=listed, other=INF)
                row = tl.load(pos_rows + clamped_m * capacity + k, mask=listed, other=-1)
                count = tl.load(violations + clamped_m * capacity + k, mask=listed, other=0).to(tl.float32)
                negative += tl.where((sims - margin)[:, None] < S, 1.0, 0.0)
                positive += tl.where(offs_n[None, :] == row[:, None], count[:, None], 0.0)
            negative = negative_weight * tl.where(above_floor, negative, 0.0)
            positive = positive_weight * positive
        else:
            negative = tl.where(above_floor, negative_weight, 0.0)
            positive = positive_weight + tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        w = tl.where(mask, tl.where(same, -positive, negative), 0.0)
        anchor_ptrs = anchors + clamped_m.to(tl.int64)[:, None] * D + offs_d[None, :]
        a = tl.load(anchor_ptrs, mask=(offs_m < m)[:, None] & (offs_d < D)[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(tl.trans(w), a, acc, input_precision=PRECISION)
    row_offs = offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask_rows = mask_n[:, None] & (offs_d < D)[None, :]
    if ADD:
        acc += tl.load(gradient + row_offs, mask=mask_rows, other=0.0)
    tl.store(row_gradient + row_offs, acc.to(row_gradient.dtype.element_ty), mask=mask_rows)


_clean, _row_gradient = (Kernel(jitted, overlap=True) for jitted in (clean_kernel, row_gradient_kernel))


def clean_anchors(
    case: Case, s: Settings, key: int | None, given: Tensor, ids: Tensor | None, sound: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The anchors with zeros for unsound ones, whose NaN would spread through a product; and (m,) stamps, -1 for those."""
    cleaned, stamps = torch.empty_like(given), torch.empty(case.m, dtype=torch.int64, device=case.device)
    _clean(
        key, (case.m, 1, 1), 4, 2, given, ids, sound, cleaned, stamps,
        s.tolerance, case.D, case.has_ids, case.has_sound, 512,
    )  # fmt: skip
    return cleaned, stamps


def gradient_of_rows(
    case: Case, s: Settings, key: int | None, pairs: tuple, positives: Positives, workspace: Tensor,
    temperature: Tensor | None, gradient: Tensor, M: int,
) -> Tensor:  # fmt: skip
    """(M, D): the gradient of the mean loss in the first M rows; within a batch, that of the anchors is added."""
    p, c = s.plan, case.loss
    listed = positives.counts, positives.similarities, positives.rows, positives.violations
    result = torch.empty((M, case.D), dtype=case.bank_dtype, device=case.device)
    _row_gradient(
        key, (-(-M // 64), -(-case.D // 128), 1), 8, 2, *pairs, *listed, workspace, temperature, gradient, result,
        case.m, M, p.num_splits, p.capacity, c.margin, c.alpha, c.beta, c.base,
        s.kind, case.in_batch, case.exclude_id, case.exclude_slot, case.D, 64, 64, 128, p.tiles.step, "ieee",
    )  # fmt: skip
    return result
