# mypy: disable-error-code="no-untyped-def"
"""What follows the pass over the bank: the kernel that completes loss and gradient, and the gradient of the rows.

`finish_kernel` adds up the partial sums of all programs in a fixed order, adds the positives, and writes the results. One
program takes one anchor and BLOCK_D columns of its gradient. The program that ends last (a counter tells) adds up the anchors'
losses, always in the same order.

`row_gradient_kernel` computes the gradient with respect to the rows, once every anchor's coefficients are known:
∂L/∂v_j = Σ_i w_ij·a_i. It is used by memories that are updated by back-propagation, and for a batch compared with itself,
where the rows are the anchors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.engine.terms import Result
from xbm.engine.triton.loss_formulas import (
    combine_sides,
    distance,
    inverse_temperature,
    negative_logits,
    negative_slopes,
    positive_exponent,
    side_weights,
    softmax_terms,
    weigh_positives,
)
from xbm.engine.triton.plan import REDUCE_COLUMNS, REDUCE_SPLITS, Case, Settings
from xbm.engine.triton.positives import Positives
from xbm.kernels import Kernel

from xbm.engine.triton.primitives import (  # isort: skip
    CEILING, CONTRASTIVE, CONTRASTIVE_ONE_PASS, EASIEST_POSITIVE, EXTRA, FLOOR, HARDEST_NEGATIVE, HARDEST_POSITIVE, INF, LOSS,
    MARGIN, MEAN, MULTI_SIMILARITY, NEGATIVE_PEAK, NEGATIVE_WEIGHT, NEWEST_SLOT, NO_PEAK, NUM_NEGATIVES, OVERFLOW_NEGATIVES,
    OVERFLOW_POSITIVES, OVERFLOW_TRIPLETS, OVERFLOW_VALUE, POSITIVE_PEAK, POSITIVE_VALUE, POSITIVE_WEIGHT, SIZES, SOUND, SUM,
    SUP_CON, TRIPLET, VALUE, anchor_similarities, block_similarities, candidate_mask, counter_ptr, is_sound, log1p_exp_sum,
    partials_ptr, positive_mask, results_ptr, self_slots, wait_for_previous,
)  # fmt: skip


@triton.jit
def was_written_last(given, rows, row_labels, labels, pointer, latest, anchor, m, M, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether the latest enqueue of the queue wrote this anchor at its place, or nothing was enqueued yet."""
    slot = self_slots(pointer, pointer, anchor, m, M, NEWEST_SLOT)
    row = tl.maximum(slot, 0)
    differences = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        v = tl.load(rows + row.to(tl.int64) * D + offs_k, mask=offs_k < D, other=0.0)
        x = tl.load(given + anchor.to(tl.int64) * D + offs_k, mask=offs_k < D, other=0.0).to(v.dtype)
        differences += (x.to(tl.float32) != v.to(tl.float32)).to(tl.int32)
    same = (tl.sum(differences, 0) == 0) & (tl.load(row_labels + row) == tl.load(labels + anchor))
    newest = tl.load(latest)
    return ((same | (slot < 0)) & (newest == m)) | (newest == 0)


@triton.jit(do_not_specialize=SIZES)
def finish_kernel(
    given,  # (m, D), the anchors before cleaning: for the checks
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer, latest, given_sound,
    pos_counts, lowest, highest, pos_sims, pos_rows, violations, overflow, overflow_gradient,
    workspace, pos_gradients, temperature,
    loss, gradient, valid_counts, extremes, unsound,  # out: (), (m, D), (2, m), (3, m), ()
    m, M, num_splits, capacity, tolerance, margin, alpha, beta, base,
    KIND: tl.constexpr, REDUCTION: tl.constexpr, STATS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr,
    EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, SCALE: tl.constexpr,
    OVERFLOW: tl.constexpr,  # whether an anchor may have more positives than its list holds
):  # fmt: skip
    wait_for_previous()
    anchor = tl.program_id(0)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    sound = is_sound(given, anchor, ids, given_sound, tolerance, D, HAS_IDS, HAS_SOUND, BLOCK_K)
    if EXCLUDE_SLOT == NEWEST_SLOT:
        sound = sound & was_written_last(given, rows, row_labels, labels, pointer, latest, anchor, m, M, D, BLOCK_K)

    beta = inverse_temperature(temperature, beta)

    # ---- the partial sums of the pass over the bank
    partials, results = partials_ptr(workspace, m, num_splits, D), results_ptr(workspace, m, num_splits, D)
    offs_split = tl.arange(0, SPLITS_PADDED)
    mask_split = offs_split < num_splits
    stride_field = m * num_splits
    partial_ptrs = partials + anchor * num_splits + offs_split
    values = tl.load(partial_ptrs + VALUE * stride_field, mask=mask_split, other=0.0)
    extras = tl.load(partial_ptrs + EXTRA * stride_field, mask=mask_split, other=0.0)
    num_negatives = tl.sum(tl.load(partial_ptrs + NUM_NEGATIVES * stride_field, mask=mask_split, other=0.0).to(tl.int32), 0)
    hardest = tl.max(tl.load(partial_ptrs + HARDEST_NEGATIVE * stride_field, mask=mask_split, other=-INF), 0)
    negative_peak = 0.0
    if KIND == MULTI_SIMILARITY or KIND >= SUP_CON:
        if KIND >= SUP_CON:
            extras = tl.where(mask_split, extras, NO_PEAK)
        negative_peak = tl.max(extras, 0)
        value = tl.sum(values * tl.exp(extras - negative_peak), 0)
    else:
        value = tl.sum(values, 0)
    extra = tl.sum(extras, 0)
    grad = tl.zeros((BLOCK_D,), tl.float32)
    pos_grad = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        grad_offs = (offs_s.to(tl.int64)[:, None] * m + anchor) * D + offs_d[None, :]
        partial = tl.load(workspace + grad_offs, mask=(offs_s < num_splits)[:, None] & mask_d[None, :], other=0.0)
        if KIND == CONTRASTIVE_ONE_PASS and REDUCTION != SUM:
            mask = (offs_s < num_splits)[:, None] & mask_d[None, :]
            pos_grad += tl.sum(tl.load(pos_gradients + grad_offs, mask=mask, other=0.0), 0)
        if KIND == MULTI_SIMILARITY or KIND >= SUP_CON:
            exponent_ptrs = partials + EXTRA * stride_field + anchor * num_splits + offs_s
            exponent = tl.load(exponent_ptrs, mask=offs_s < num_splits, other=0.0)
            if KIND >= SUP_CON:
                exponent = tl.where(offs_s < num_splits, exponent, NO_PEAK)
            partial = partial * tl.exp(exponent - negative_peak)[:, None]
        grad += tl.sum(partial, 0)
    grad = grad * (1.0 / SCALE)

    # ---- the positives
    negative_weight = 1.0
    positive_weight = 1.0
    positive_peak = 0.0
    floor = margin
    ceiling = INF
    active = sound
    if KIND == CONTRASTIVE_ONE_PASS:
        num_positives = tl.sum(extras.to(tl.int32), 0)
        easiest_positive = tl.max(tl.load(partial_ptrs + EASIEST_POSITIVE * stride_field, mask=mask_split, other=-INF), 0)
        hardest_positive = tl.min(tl.load(partial_ptrs + HARDEST_POSITIVE * stride_field, mask=mask_split, other=INF), 0)
        anchor_loss = value
        if REDUCTION != SUM:
            pos_value = tl.sum(tl.load(partial_ptrs + POSITIVE_VALUE * stride_field, mask=mask_split, other=0.0), 0)
            negative_weight, positive_weight = side_weights(num_negatives, num_positives, REDUCTION)
            anchor_loss = positive_weight * pos_value + negative_weight * value
            grad = negative_weight * grad - positive_weight * pos_grad
    else:
        num_positives = 0
        total_positives = tl.load(pos_counts + anchor)
        hardest_positive, easiest_positive = tl.load(lowest + anchor), tl.load(highest + anchor)
        if KIND == MULTI_SIMILARITY:
            ceiling = hardest + margin
            # the least similar positive has the largest logit, and is valid if any is
            positive_peak = tl.where(hardest_positive < ceiling, tl.maximum(-alpha * (hardest_positive - base), 0.0), 0.0)
        if KIND >= MULTI_SIMILARITY and KIND < MARGIN:
            floor = hardest_positive - margin
        if KIND == SUP_CON:  # the softmax is over the positives too
            joint_peak = tl.maximum(negative_peak, tl.where(easiest_positive > -INF, beta * easiest_positive, NO_PEAK))
            shrink = tl.exp(negative_peak - joint_peak)
            value = value * shrink
            grad = grad * shrink
            negative_peak = joint_peak
        if KIND >= MARGIN:
            positive_peak = positive_exponent(hardest_positive, negative_peak, value, beta, base, KIND)
        pos_value = 0.0
        pos_total = 0.0
        num_listed = total_positives
        if OVERFLOW:
            num_listed = tl.where(total_positives > capacity, 0, total_positives)
        for start in range(0, num_listed, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            mask_p = offs_p < num_listed
            offs_n = tl.load(pos_rows + anchor * capacity + offs_p, mask=mask_p, other=0)
            if KIND == TRIPLET:
                w = tl.load(violations + anchor * capacity + offs_p, mask=mask_p, other=0).to(tl.float32)
                num_positives += tl.sum((w > 0).to(tl.int32), 0)
            else:
                sims = tl.load(pos_sims + anchor * capacity + offs_p, mask=mask_p, other=INF)
                pos_values, w, valid = weigh_positives(sims, mask_p, ceiling, positive_peak, alpha, beta, base, KIND)
                pos_value += tl.sum(pos_values, 0)
                num_positives += tl.sum(valid.to(tl.int32), 0)
                if KIND >= MARGIN:
                    pos_total += tl.sum(w, 0)
            mask_v = mask_p[:, None] & mask_d[None, :]
            v = tl.load(rows + offs_n.to(tl.int64)[:, None] * D + offs_d[None, :], mask=mask_v, other=0.0)
            pos_grad += tl.sum(w[:, None] * v.to(tl.float32), 0)
            if KIND == SUP_CON:
                terms = softmax_terms(sims, mask_p, negative_peak, beta)
                value += tl.sum(terms, 0)
                grad += tl.sum(terms[:, None] * v.to(tl.float32), 0)
        if OVERFLOW and KIND == TRIPLET:
            if total_positives > capacity:
                value = tl.load(overflow + OVERFLOW_VALUE * m + anchor)
                extra = tl.load(overflow + OVERFLOW_TRIPLETS * m + anchor)
                num_negatives = tl.load(overflow + OVERFLOW_NEGATIVES * m + anchor).to(tl.int32)
                num_positives = tl.load(overflow + OVERFLOW_POSITIVES * m + anchor).to(tl.int32)
                grad = tl.load(overflow_gradient + anchor.to(tl.int64) * D + offs_d, mask=mask_d, other=0.0)
        elif OVERFLOW:  # noqa: SIM102 (one condition is known at compile time, the other is not)
            if total_positives > capacity:  # scan the bank for them again
                offs_m = anchor + tl.arange(0, 1)
                slot = self_slots(own, pointer, offs_m, m, M, EXCLUDE_SLOT)
                anchor_id = tl.load(ids + offs_m) if EXCLUDE_ID else slot
                label = tl.load(labels + anchor)
                for start in range(0, M, BLOCK_P):
                    offs_n = start + tl.arange(0, BLOCK_P)
                    mask_p = positive_mask(
                        offs_n, offs_n < M, row_labels, stamps, row_ids, label, anchor_id, slot, EXCLUDE_ID, EXCLUDE_SLOT, False
                    )
                    if tl.max(mask_p.to(tl.int32), 0) > 0:
                        sims = anchor_similarities(anchors, rows, anchor, offs_n, mask_p, D, BLOCK_P, BLOCK_K)
                        pos_values, w, valid = weigh_positives(sims, mask_p, ceiling, positive_peak, alpha, beta, base, KIND)
                        pos_value += tl.sum(pos_values, 0)
                        num_positives += tl.sum(valid.to(tl.int32), 0)
                        if KIND >= MARGIN:
                            pos_total += tl.sum(w, 0)
                        row_ptrs = rows + offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
                        v = tl.load(row_ptrs, mask=mask_p[:, None] & mask_d[None, :], other=0.0)
                        pos_grad += tl.sum(w[:, None] * v.to(tl.float32), 0)
                        if KIND == SUP_CON:
                            terms = softmax_terms(sims, mask_p, negative_peak, beta)
                            value += tl.sum(terms, 0)
                            grad += tl.sum(terms[:, None] * v.to(tl.float32), 0)

        # ---- the loss from both sides
        if KIND == CONTRASTIVE:
            negative_weight, positive_weight = side_weights(num_negatives, num_positives, REDUCTION)
            anchor_loss = positive_weight * pos_value + negative_weight * value
        elif KIND >= MARGIN:
            anchor_loss, negative_weight, positive_weight, counts = combine_sides(
                value, negative_peak, num_negatives, extra, pos_value, positive_peak, num_positives, pos_total,
                beta, KIND, REDUCTION,
            )  # fmt: skip
            active = sound & counts
            num_positives = tl.where(active, num_positives, 0)
            num_negatives = tl.where(active, num_negatives, 0)
        elif KIND == MULTI_SIMILARITY:
            active = sound & (num_positives > 0) & (num_negatives > 0)
            anchor_loss = log1p_exp_sum(pos_value, positive_peak) / alpha + log1p_exp_sum(value, negative_peak) / beta
            negative_weight = 1.0 / (tl.exp(-negative_peak) + value)
            positive_weight = 1.0 / (tl.exp(-positive_peak) + pos_value)
            num_positives = tl.where(active, num_positives, 0)
            num_negatives = tl.where(active, num_negatives, 0)
        else:
            if REDUCTION == MEAN:
                negative_weight = 1.0 / tl.maximum(extra, 1.0)
            positive_weight = negative_weight
            anchor_loss = negative_weight * value
        grad = negative_weight * grad - positive_weight * pos_grad

    grad = tl.where(active, grad / m, 0.0)
    tl.store(gradient + anchor.to(tl.int64) * D + offs_d, grad.to(gradient.dtype.element_ty), mask=mask_d)

    if tl.program_id(1) == 0:
        result_ptrs = results + anchor
        tl.store(result_ptrs + LOSS * m, tl.where(active, anchor_loss, 0.0))
        tl.store(result_ptrs + SOUND * m, tl.where(sound, 1.0, 0.0))
        tl.store(result_ptrs + NEGATIVE_WEIGHT * m, tl.where(active, negative_weight / m, 0.0))
        tl.store(result_ptrs + POSITIVE_WEIGHT * m, tl.where(active, positive_weight / m, 0.0))
        tl.store(result_ptrs + NEGATIVE_PEAK * m, negative_peak)
        tl.store(result_ptrs + POSITIVE_PEAK * m, positive_peak)
        tl.store(result_ptrs + FLOOR * m, floor)
        tl.store(result_ptrs + CEILING * m, ceiling)
        if STATS:
            tl.store(valid_counts + anchor, tl.where(sound, num_positives, 0).to(tl.int64))
            tl.store(valid_counts + m + anchor, tl.where(sound, num_negatives, 0).to(tl.int64))
            tl.store(extremes + anchor, tl.where(sound, hardest, -INF))
            tl.store(extremes + m + anchor, tl.where(sound, easiest_positive, -INF))
            tl.store(extremes + 2 * m + anchor, tl.where(sound, hardest_positive, INF))
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr(workspace, m, num_splits, D), 1, sem="acq_rel") == m - 1:
            total_loss = 0.0
            num_sound = 0.0
            for start in range(0, m, 1024):
                offs_m = start + tl.arange(0, 1024)
                total_loss += tl.sum(tl.load(results + LOSS * m + offs_m, mask=offs_m < m, other=0.0, cache_modifier=".cg"), 0)
                num_sound += tl.sum(tl.load(results + SOUND * m + offs_m, mask=offs_m < m, other=0.0, cache_modifier=".cg"), 0)
            tl.store(loss, total_loss / m)
            if STATS:
                tl.store(unsound, m - num_sound.to(tl.int64))  # type: ignore[attr-defined]


_finish = Kernel(finish_kernel, overlap=True)


def finish_step(
    case: Case, s: Settings, key: int | None, given: Tensor, pairs: tuple, latest: Tensor | None, sound: Tensor | None,
    positives: Positives, overflow: tuple[Tensor | None, Tensor | None], workspace: Tensor, pos_gradients: Tensor | None,
    temperature: Tensor | None,
) -> Result:  # fmt: skip
    """Launches the last kernel. A gradient to which that of the rows is added later comes in float32."""
    m, device, p, c = case.m, case.device, s.plan, case.loss
    loss = torch.empty((), dtype=torch.float32, device=device)
    adds_rows = case.in_batch and case.gradients
    gradient = torch.empty_like(given, dtype=torch.float32) if adds_rows else torch.empty_like(given)
    counts = extremes = unsound = None
    if case.stats:
        counts = torch.empty((2, m), dtype=torch.int64, device=device)
        extremes = torch.empty((3, m), dtype=torch.float32, device=device)
        unsound = torch.empty((), dtype=torch.int64, device=device)
    _finish(
        key, (m, p.column_blocks, 1), 4, 2, given, *pairs, latest, sound,
        *positives, *overflow, workspace, pos_gradients, temperature, loss, gradient, counts, extremes, unsound,
        m, case.M, p.num_splits, p.capacity, s.tolerance, c.margin, c.alpha, c.beta, c.base,
        s.kind, c.reduction, case.stats, case.has_ids, case.has_sound, case.exclude_id, case.exclude_slot,
        case.D, REDUCE_COLUMNS, p.splits_padded, min(REDUCE_SPLITS, p.splits_padded), 16, 128, s.scale, p.capacity < case.M,
    )  # fmt: skip
    statistics = () if counts is None or extremes is None else (*counts, *extremes)
    return Result(loss, gradient, None, statistics, unsound, easiest_positive=statistics[3] if statistics else None)


# ------------------------------------------------------------------ the gradient of the rows


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
