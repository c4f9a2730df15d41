# mypy: disable-error-code="no-untyped-def"
"""The pass over the bank: every tile of rows is read once, compared with the anchors, weighted and added to their gradients.

A program takes a block of anchors and a contiguous part of the rows. It keeps the anchors' gradient in registers (transposed
for 16-bit banks, so that the tensor cores read both operands from shared memory) and writes it once at the end; `finish` adds
up the parts in a fixed order. After the first product, one reduction tells if any pair of the tile can be valid (a negative
above its anchor's floor or, if positives are not listed, a shared label). If none is, the tile is done. With statistics, the
hardest negative is needed as well, so pairs are classified in every tile. Labels, ids and stamps have 64 bits; compared as two
32-bit words they take half the registers.

Compile-time options:
    NARROW    whole rows stay on chip for both products. Otherwise similarities are summed over BLOCK_K columns at a time, and a
              program computes BLOCK_D columns of the gradient.
    HALF      the bank has 16-bit numbers.
    PREFETCH  labels, ids and stamps are loaded for every tile, ahead of use. This pays if many tiles have valid pairs (small
              banks) and costs if few have.
    MASKED    the bank is smaller than a tile.
    RESCALE   exponentials may overflow, so sums are rescaled on the way.
    SCALE     factor of the weights in the second product, which keeps ranks and exponentials inside float16.
    SEPARATE  positives found on the way have a gradient of their own, for reductions that weight the two sides once all pairs
              are counted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xbm.engine.triton.loss_formulas import (
    counted_negatives,
    distance,
    inverse_temperature,
    negative_logits,
    negative_slopes,
)
from xbm.engine.triton.plan import Case, Settings
from xbm.engine.triton.positives import Positives
from xbm.kernels import Kernel

from xbm.engine.triton.primitives import (  # isort: skip
    CONTRASTIVE, CONTRASTIVE_ONE_PASS, EASIEST_POSITIVE, EXTRA, HARDEST_NEGATIVE, HARDEST_POSITIVE, INF, MARGIN,
    MULTI_SIMILARITY, NO_PEAK, NO_SLOT, NUM_NEGATIVES, POSITIVE_VALUE, SIZES, SUM, SUP_CON, TRIPLET, VALUE,
    as_int32, block_similarities, counter_ptr, load_anchors, load_keys, load_rows, load_words, partials_ptr, self_slots,
    wait_for_previous,
)  # fmt: skip


@triton.jit
def classify_pairs(
    sims, stamp_high, row_low, row_high, row_id_low, row_id_high, label_low, label_high, id_low, id_high, slot, offs_n,
    EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr,
):  # fmt: skip
    """The similarities with -inf for rows that do not count and for the anchor itself; and which pairs share a label."""
    sims += tl.where(stamp_high >= 0, 0.0, -INF)[None, :]
    if EXCLUDE_ID:
        same_id = ((row_id_low[None, :] ^ id_low[:, None]) | (row_id_high[None, :] ^ id_high[:, None])) == 0
        sims = tl.where(same_id, -INF, sims)
    if EXCLUDE_SLOT != NO_SLOT:
        sims = tl.where(offs_n[None, :] == slot[:, None], -INF, sims)
    return sims, ((row_low[None, :] ^ label_low[:, None]) | (row_high[None, :] ^ label_high[:, None])) == 0


@triton.jit
def add_product(acc, w, v, HALF: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr):
    """acc + w·v; if HALF, acc + (w·v)ᵀ with w rounded to the rows' type and, with RESIDUAL, its rounding error added too."""
    if HALF:
        rounded = w.to(v.dtype)
        acc = tl.dot(tl.trans(v), tl.trans(rounded), acc)
        if RESIDUAL:
            acc = tl.dot(tl.trans(v), tl.trans((w - rounded.to(tl.float32)).to(v.dtype)), acc)
    else:
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def pass_kernel(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    pos_counts, lowest, pos_sims, violations,  # see Positives
    workspace,  # out, see primitives.py
    pos_gradients,  # out, (num_splits, m, D): the positives' part of the gradients, or None
    rows_desc,  # tensor descriptor of the rows, or None
    temperature,  # (), if it is learned: beta is then read from it
    m, M, rows_per_split, num_splits, capacity, margin, beta, base,
    KIND: tl.constexpr, STATS: tl.constexpr, EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, MASKED: tl.constexpr,
    RESCALE: tl.constexpr, HEADROOM: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    num_slices: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    slice_d = tl.program_id(0) % num_slices
    offs_m = tl.program_id(0) // num_slices * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    clamped_m = tl.minimum(offs_m, m - 1)
    offs_d = slice_d * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)

    label = tl.load(labels + clamped_m)
    label_low, label_high = label.to(tl.int32), (label >> 32).to(tl.int32)
    anchor_id = tl.load(ids + clamped_m) if EXCLUDE_ID else label
    id_low, id_high = anchor_id.to(tl.int32), (anchor_id >> 32).to(tl.int32)
    slots = self_slots(own, pointer, clamped_m, m, M, EXCLUDE_SLOT)
    beta = inverse_temperature(temperature, beta)

    floor = tl.full((BLOCK_M,), margin, tl.float32)
    if KIND >= MULTI_SIMILARITY and KIND < MARGIN:
        floor = tl.load(lowest + clamped_m) - margin
    if KIND == TRIPLET:
        num_listed = tl.load(pos_counts + clamped_m)
        floor = tl.where(num_listed > capacity, INF, floor)  # overflow_kernel takes those
        num_listed = tl.where(num_listed > capacity, 0, num_listed)
        most_listed = tl.max(num_listed, 0)
    floor = tl.where(offs_m < m, floor, INF)

    if NARROW:
        a = load_anchors(anchors, rows, workspace, offs_m, clamped_m, offs_d, split, m, D, HALF)
    acc = tl.zeros((BLOCK_D, BLOCK_M) if HALF else (BLOCK_M, BLOCK_D), tl.float32)
    pos_acc = tl.zeros(((BLOCK_D, BLOCK_M) if HALF else (BLOCK_M, BLOCK_D)) if SEPARATE else (1, 1), tl.float32)
    value = tl.zeros((BLOCK_M,), tl.float32)
    pos_value = tl.zeros((BLOCK_M,), tl.float32)
    extra = tl.zeros((BLOCK_M,), tl.float32)
    if RESCALE and KIND >= SUP_CON:
        extra = tl.full((BLOCK_M,), NO_PEAK, tl.float32)
    num_negatives = tl.zeros((BLOCK_M,), tl.float32)
    hardest = tl.full((BLOCK_M,), -INF, tl.float32)
    hardest_of_column = tl.full((BLOCK_M, BLOCK_N) if STATS else (1, 1), -INF, tl.float32)
    easiest_positive = tl.full((BLOCK_M,), -INF, tl.float32)
    hardest_positive = tl.full((BLOCK_M,), INF, tl.float32)

    first = split.to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, M)
    num_rows = (last - first).to(tl.int32)
    # With an explicit number of stages, tiles are prefetched whatever uses them, not only for an unconditional product.
    for start in tl.range(0, num_rows, BLOCK_N, num_stages=STAGES):
        # The last tile starts early enough to lie inside the bank, so that only rows of the previous tile need a mask.
        base_row = first + start
        if MASKED:
            mask_n = offs_n < num_rows - start
        else:
            base_row = tl.minimum(base_row, M - BLOCK_N)
            mask_n = (offs_n >= (first + start - base_row).to(tl.int32)) & (offs_n < (last - base_row).to(tl.int32))
        tile = rows + base_row * D
        if PREFETCH:
            stamp_high, row_low, row_high, row_id_low, row_id_high = load_keys(
                base_row, offs_n, mask_n, stamps, row_labels, row_ids, EXCLUDE_ID, MASKED
            )
        elif KIND == CONTRASTIVE_ONE_PASS:
            row_low = load_words(as_int32(row_labels) + 2 * base_row, offs_n, mask_n, MASKED)
        if NARROW:
            if rows_desc is None:
                v = load_rows(tile, offs_n, offs_d, mask_n, D, BLOCK_D, MASKED)
            else:
                v = rows_desc.load([base_row.to(tl.int32), 0])
            product = tl.dot(a, tl.trans(v), input_precision=PRECISION)
        else:
            product = block_similarities(
                anchors, tile, clamped_m, offs_n, offs_m < m, mask_n, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
            )
        if HALF:
            S = tl.full((BLOCK_M, BLOCK_N), -INF, tl.float32)
            if start < num_rows:  # always true; with two products in a row all warps would be laid out along the anchors
                S = product + tl.where(mask_n, 0.0, -INF)[None, :]
        else:
            S = product + tl.where(mask_n, 0.0, -INF)[None, :]
        anchor_keys = label_low, label_high, id_low, id_high, slots - base_row.to(tl.int32)
        if STATS:
            row_keys = stamp_high, row_low, row_high, row_id_low, row_id_high
            sims, same = classify_pairs(S, *row_keys, *anchor_keys, offs_n, EXCLUDE_ID, EXCLUDE_SLOT)
            hardest_of_column = tl.maximum(hardest_of_column, tl.where(same, -INF, sims))
            above = tl.where(same, -INF, sims) - floor[:, None]
            if KIND == CONTRASTIVE_ONE_PASS:
                above = tl.where(same & (sims > -INF), INF, above)
        else:
            above = S - floor[:, None]
            if KIND == CONTRASTIVE_ONE_PASS:
                above = tl.where(row_low[None, :] == label_low[:, None], INF, above)
        if tl.max(above) > 0:
            if not PREFETCH:
                row_keys = load_keys(base_row, offs_n, mask_n, stamps, row_labels, row_ids, EXCLUDE_ID, MASKED)
                sims, same = classify_pairs(S, *row_keys, *anchor_keys, offs_n, EXCLUDE_ID, EXCLUDE_SLOT)
            elif not STATS:
                row_keys = stamp_high, row_low, row_high, row_id_low, row_id_high
                sims, same = classify_pairs(S, *row_keys, *anchor_keys, offs_n, EXCLUDE_ID, EXCLUDE_SLOT)
            if not NARROW:
                v = load_rows(tile, offs_n, offs_d, mask_n, D, BLOCK_D, MASKED)
            if KIND == CONTRASTIVE_ONE_PASS:
                positive = same & (sims > -INF)
                valid = (sims > floor[:, None]) & (same == 0)
                if SEPARATE:
                    w = tl.where(valid, 1.0, 0.0)
                    value += tl.sum(tl.where(valid, sims - margin, 0.0), 1)
                    pos_value += tl.sum(tl.where(positive, 1.0 - sims, 0.0), 1)
                    pos_acc = add_product(pos_acc, tl.where(positive, 1.0, 0.0), v, HALF, False, PRECISION)
                else:
                    w = tl.where(positive, -1.0, tl.where(valid, 1.0, 0.0))
                    value += tl.sum(tl.where(positive, 1.0 - sims, tl.where(valid, sims - margin, 0.0)), 1)
                if STATS or SEPARATE:
                    num_negatives += tl.sum(valid.to(tl.float32), 1)
                    extra += tl.sum(positive.to(tl.float32), 1)
                if STATS:
                    easiest_positive = tl.maximum(easiest_positive, tl.max(tl.where(positive, sims, -INF), 1))
                    hardest_positive = tl.minimum(hardest_positive, tl.min(tl.where(positive, sims, INF), 1))
            else:
                sims = tl.where(same, -INF, sims)
                valid = sims > floor[:, None]
                num_negatives += tl.sum(counted_negatives(valid, sims, base, KIND).to(tl.float32), 1)
            if KIND == CONTRASTIVE:
                w = tl.where(valid, 1.0, 0.0)
                value += tl.sum(tl.where(valid, sims - margin, 0.0), 1)
            elif KIND == MARGIN:
                d, steepness = distance(sims)
                w = tl.where(valid, steepness, 0.0)
                value += tl.sum(tl.where(valid, beta - d, 0.0), 1)
                extra += tl.sum(w, 1)
            elif KIND == MULTI_SIMILARITY or KIND >= SUP_CON:
                if KIND == MULTI_SIMILARITY and not STATS:
                    hardest = tl.maximum(hardest, tl.max(sims, 1))
                # extra is the exponent from which an anchor's terms are measured. It moves only if a term would overflow; with
                # common hyper-parameters it never does. It starts at the zero logit or, if a sum of small terms must not
                # vanish beside it, at the first tile's largest.
                logit = negative_logits(sims, beta, base, KIND)
                if RESCALE:
                    peak = tl.max(tl.where(valid, logit, -INF), 1)
                    if tl.max(peak - extra, 0) > HEADROOM:
                        raised = tl.where(peak > extra + HEADROOM, peak, extra)
                        shrink = tl.exp(extra - raised)
                        value = value * shrink
                        acc = acc * (shrink[None, :] if HALF else shrink[:, None])
                        extra = raised
                    logit = logit - extra[:, None]
                w = tl.where(valid, tl.exp(logit), 0.0)
                value += tl.sum(w, 1)
                w = negative_slopes(w, sims, base, KIND)
            elif KIND == TRIPLET:
                w = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # the number of positives that a negative violates
                loss = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, most_listed, 4):
                    hits = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)  # of four positives, a byte each: a tile has at most 64 rows
                    for byte in tl.static_range(4):
                        listed = k + byte < num_listed
                        threshold = tl.load(pos_sims + clamped_m * capacity + k + byte, mask=listed, other=INF) - margin
                        excess = sims - threshold[:, None]
                        w += tl.where(excess > 0, 1.0, 0.0)
                        loss += tl.maximum(excess, 0.0)
                        hits += tl.where(excess > 0, 1 << (8 * byte), 0)
                    packed = tl.sum(hits, 1)
                    for byte in tl.static_range(4):
                        count = (packed >> (8 * byte)) & 255
                        # integers: their sum is the same in any order
                        mask = (count > 0) & (offs_m < m) & (slice_d == 0)
                        tl.atomic_add(violations + clamped_m * capacity + k + byte, count, mask=mask, sem="relaxed")
                value += tl.sum(loss, 1)
                extra += tl.sum(w, 1)
            if SCALE != 1:
                w = w * SCALE
            acc = add_product(acc, w, v, HALF, KIND >= MULTI_SIMILARITY, PRECISION)

    if STATS:
        hardest = tl.max(hardest_of_column, 1)
    if HALF:
        grad_offs = (split.to(tl.int64) * m + clamped_m[None, :]) * D + offs_d[:, None]
        mask = (offs_m < m)[None, :] & (offs_d < D)[:, None]
    else:
        grad_offs = (split.to(tl.int64) * m + clamped_m[:, None]) * D + offs_d[None, :]
        mask = (offs_m < m)[:, None] & (offs_d < D)[None, :]
    tl.store(workspace + grad_offs, acc, mask=mask)
    if SEPARATE:
        tl.store(pos_gradients + grad_offs, pos_acc, mask=mask)
    mask_m = (offs_m < m) & (slice_d == 0)
    partials = partials_ptr(workspace, m, num_splits, D) + offs_m * num_splits + split
    stride_field = m * num_splits
    tl.store(partials + VALUE * stride_field, value, mask=mask_m)
    tl.store(partials + NUM_NEGATIVES * stride_field, num_negatives, mask=mask_m)
    tl.store(partials + EXTRA * stride_field, extra, mask=mask_m)
    tl.store(partials + HARDEST_NEGATIVE * stride_field, hardest, mask=mask_m)
    tl.store(partials + EASIEST_POSITIVE * stride_field, easiest_positive, mask=mask_m)
    tl.store(partials + HARDEST_POSITIVE * stride_field, hardest_positive, mask=mask_m)
    if SEPARATE:
        tl.store(partials + POSITIVE_VALUE * stride_field, pos_value, mask=mask_m)
    if (tl.program_id(0) == 0) & (split == 0):
        tl.store(counter_ptr(workspace, m, num_splits, D), 0)


_pass = Kernel(pass_kernel, overlap=True)


def compare_with_bank(
    case: Case, s: Settings, key: int | None, pairs: tuple, positives: Positives, workspace: Tensor, temperature: Tensor | None
) -> Tensor | None:
    """Fills the workspace; returns the positives' part of the gradients if it is kept separate."""
    p, t, c = s.plan, s.plan.tiles, case.loss
    listed = positives.counts, positives.lowest, positives.similarities, positives.violations
    separate = s.kind == CONTRASTIVE_ONE_PASS.value and c.reduction != SUM.value
    pos_gradients = rows_desc = None
    if separate:
        pos_gradients = torch.empty((p.num_splits, case.m, case.D), dtype=torch.float32, device=case.device)
    if s.by_descriptor:
        rows_desc = TensorDescriptor(pairs[1], [case.M, case.D], [case.D, 1], [t.rows, t.columns])
    _pass(
        key, (p.blocks, p.num_splits, 1), t.warps, t.stages, *pairs, *listed, workspace, pos_gradients, rows_desc, temperature,
        case.m, case.M, p.rows_per_split, p.num_splits, p.capacity, c.margin, c.beta, c.base,
        s.kind, case.stats, case.exclude_id, case.exclude_slot, case.D, t.anchors, t.rows, t.columns, t.step,
        t.narrow, s.half, t.stages if t.narrow else 1, case.stats or case.small or s.kind >= SUP_CON.value, t.rows > case.M,
        s.rescale, s.headroom, s.scale, t.precision, separate,
    )  # fmt: skip
    return pos_gradients
