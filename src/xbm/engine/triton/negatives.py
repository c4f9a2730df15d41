# mypy: disable-error-code="no-untyped-def"
"""The pass over the bank: every tile of rows is read once, compared with the anchors, weighed and added to their gradients.

A program takes a block of anchors and a contiguous part of the rows, keeps the anchors' gradient in registers (for half
banks transposed, so that the tensor cores take both operands from shared memory) and writes it once at the end; `finish`
adds up the parts in fixed order. After the first product one look tells whether any pair of the tile can count (a negative
above its anchor's floor or, where positives are not listed, a shared label). Another look tells whether any row of the
tile is related to an anchor, by label, id or slot; only then are pairs told apart. Labels, ids and stamps are numbers of 64
bits; compared by their halves they take half the registers.

NARROW keeps whole rows on chip for both products. Otherwise (wide rows) similarities are summed over steps of BK columns
and a program adds up DS columns of the gradient. ALWAYS: see plan.py. Weights enter the second product times SCALE, which
keeps ranks and exponentials inside float16.
"""

import triton
import triton.language as tl

from xbm.engine.triton.tiles import (  # isort: skip
    BOTH, CONTRASTIVE, EASIEST_POSITIVE, EXTRA, HARDEST, HARDEST_POSITIVE, INF, MULTI_SIMILARITY, NEGATIVES, NO_SLOT, SIZES,
    TRIPLET, VALUE, counter_in, halves, own_slots, similarities, smallest, sums_in, total,
)  # fmt: skip


@triton.jit
def words(of, n, live, PADDED: tl.constexpr):
    """Every other word of a tile's rows."""
    if PADDED:
        return tl.load(of + 2 * n, mask=live, other=-1)
    else:
        return tl.load(of + 2 * n)


@triton.jit
def rows_of_tile(tile, n, d, live, D: tl.constexpr, DS: tl.constexpr, PADDED: tl.constexpr):
    """(BN, DS): rows, zero beyond the bank and beyond D."""
    of = tile + (n[:, None] * D + d[None, :])
    if PADDED:
        return tl.load(of, mask=live[:, None] & (d < D)[None, :], other=0.0)
    elif D % DS == 0:
        return tl.load(of)
    else:
        return tl.load(of, mask=(d < D)[None, :] & (n >= 0)[:, None], other=0.0)


@triton.jit
def add_product(acc, w, v, HALF: tl.constexpr, TWICE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + (w·v)ᵀ, with w in the rows' type and, TWICE, what its rounding leaves too. Not HALF: acc + w·v."""
    if HALF:
        rounded = w.to(v.dtype)
        acc = tl.dot(tl.trans(v), tl.trans(rounded), acc)
        if TWICE:
            acc = tl.dot(tl.trans(v), tl.trans((w - rounded.to(tl.float32)).to(v.dtype)), acc)
    else:
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def meet(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    counts, lowest, listed, beaten,  # of the positives, see positives.py
    work,  # out, see tiles.py
    m, M, per, splits, scans, cap, margin, beta, base,
    KIND: tl.constexpr, STATS: tl.constexpr, BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr,
    ALWAYS: tl.constexpr, PADDED: tl.constexpr, HEADROOM: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = (D + DS - 1) // DS
    part = tl.program_id(0) % slices
    i = tl.program_id(0) // slices * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    known = tl.minimum(i, m - 1)
    d = part * DS + tl.arange(0, DS)
    n = tl.arange(0, BN)

    label = tl.load(labels + known)
    label_low, label_high = label.to(tl.int32), (label >> 32).to(tl.int32)
    if BY_ID:
        anchor_id = tl.load(ids + known)
        id_low, id_high = anchor_id.to(tl.int32), (anchor_id >> 32).to(tl.int32)
    slots = own_slots(own, pointer, known, m, M, BY_SLOT)

    floor = tl.full((BM,), margin, tl.float32)
    if KIND >= MULTI_SIMILARITY:
        floor = smallest(lowest, known, scans, BM, 128) - margin
    if KIND == TRIPLET:
        positives = total(counts, known, scans, scans, BM, 128)
        floor = tl.where(positives > cap, INF, floor)  # crowded.py sees to those
        positives = tl.where(positives > cap, 0, positives)
        most = tl.max(positives, 0)
    floor = tl.where(i < m, floor, INF)

    if NARROW:
        a = tl.load(anchors + known[:, None] * D + d[None, :], mask=(i < m)[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.zeros((DS, BM) if HALF else (BM, DS), tl.float32)
    value = tl.zeros((BM,), tl.float32)
    extra = tl.zeros((BM,), tl.float32)
    negatives = tl.zeros((BM,), tl.float32)
    hardest = tl.full((BM,), -INF, tl.float32)
    easiest_positive = tl.full((BM,), -INF, tl.float32)
    hardest_positive = tl.full((BM,), INF, tl.float32)

    first = split.to(tl.int64) * per
    last = tl.minimum(first + per, M)
    todo = (last - first).to(tl.int32)
    for start in range(0, todo, BN):
        # A tile at the bank's end starts early enough to lie inside, so that nothing needs a mask but the rows met before.
        base_row = first + start
        if PADDED:
            live = n < todo - start
        else:
            base_row = tl.minimum(base_row, M - BN)
            live = (n >= (first + start - base_row).to(tl.int32)) & (n < (last - base_row).to(tl.int32))
        tile = rows + base_row * D
        row_words, stamp_words = halves(row_labels) + 2 * base_row, halves(stamps) + 2 * base_row
        if NARROW:
            v = rows_of_tile(tile, n, d, live, D, DS, PADDED)
            if KIND == BOTH:
                row_low = words(row_words, n, live, PADDED)
            if ALWAYS:
                S = tl.zeros((BM, BN), tl.float32)
                if start < todo:  # always; but the compiler lays out two products in a row for warps along the anchors only
                    S = tl.dot(a, tl.trans(v), input_precision=PRECISION)
            else:
                S = tl.dot(a, tl.trans(v), input_precision=PRECISION)
        else:
            if KIND == BOTH:
                row_low = words(row_words, n, live, PADDED)
            S = similarities(anchors, tile, known, n, i < m, live, D, BM, BN, BK, PRECISION)
        above = S - floor[:, None]
        if KIND == BOTH:
            above = tl.where(row_low[None, :] == label_low[:, None], INF, above)
        go = tl.max(tl.max(above, 1), 0) > 0
        if STATS:
            go = go | (start < todo)  # always; the compiler must not know, or it would not fetch tiles ahead
        if ALWAYS:
            rounded = tl.zeros((BM, BN), v.dtype)
        if go:
            if not NARROW:
                v = rows_of_tile(tile, n, d, live, D, DS, PADDED)
            # x: the similarity of a negative; -inf for a row never written, for the anchor itself and for positives
            x = S + tl.where((words(stamp_words + 1, n, live, PADDED) >= 0) & live, 0.0, -INF)[None, :]
            if KIND != BOTH:
                row_low = words(row_words, n, live, PADDED)
            # Marked in x, and not in a tile of its own, for which the compiler would choose a layout of its own.
            related = tl.where(row_low[None, :] == label_low[:, None], INF, x)
            if BY_ID:
                id_words = halves(row_ids) + 2 * base_row
                other_low = words(id_words, n, live, PADDED)
                related = tl.where(other_low[None, :] == id_low[:, None], INF, related)
            if BY_SLOT != NO_SLOT:
                related = tl.where(n[None, :] == (slots - base_row.to(tl.int32))[:, None], INF, related)
            if tl.max(tl.max(related, 1), 0) == INF:
                if BY_ID:
                    other_high = words(id_words + 1, n, live, PADDED)
                    itself = ((other_low[None, :] ^ id_low[:, None]) | (other_high[None, :] ^ id_high[:, None])) == 0
                    x = tl.where(itself, -INF, x)
                if BY_SLOT != NO_SLOT:
                    x = tl.where(n[None, :] == (slots - base_row.to(tl.int32))[:, None], -INF, x)
                row_high = words(row_words + 1, n, live, PADDED)
                same = ((row_low[None, :] ^ label_low[:, None]) | (row_high[None, :] ^ label_high[:, None])) == 0
                if KIND == BOTH:
                    positive = same & (x > -INF)
                    value += tl.sum(tl.where(positive, 1.0 - x, 0.0), 1)
                    acc = add_product(acc, tl.where(positive, -1.0, 0.0), v, HALF, False, PRECISION)
                    if STATS:
                        extra += tl.sum(positive.to(tl.float32), 1)
                        easiest_positive = tl.maximum(easiest_positive, tl.max(tl.where(positive, x, -INF), 1))
                        hardest_positive = tl.minimum(hardest_positive, tl.min(tl.where(positive, x, INF), 1))
                x = tl.where(same, -INF, x)

            valid = x > floor[:, None]
            if STATS or KIND != BOTH:
                negatives += tl.sum(valid.to(tl.float32), 1)
            if STATS or KIND == MULTI_SIMILARITY:
                hardest = tl.maximum(hardest, tl.max(x, 1))
            if KIND <= CONTRASTIVE:
                w = tl.where(valid, 1.0, 0.0)
                value += tl.sum(tl.where(valid, x - margin, 0.0), 1)
            elif KIND == MULTI_SIMILARITY:
                # extra: the exponent that an anchor's terms are measured from. It starts at the zero logit and moves
                # only when a term would leave the range of numbers: for common constants never.
                logit = beta * (x - base)
                peak = tl.max(tl.where(valid, logit, -INF), 1)
                if tl.max(peak - extra, 0) > HEADROOM:
                    raised = tl.where(peak > extra + HEADROOM, peak, extra)
                    shrink = tl.exp(extra - raised)
                    value = value * shrink
                    acc = acc * (shrink[None, :] if HALF else shrink[:, None])
                    extra = raised
                w = tl.where(valid, tl.exp(logit - extra[:, None]), 0.0)
                value += tl.sum(w, 1)
            else:
                w = tl.zeros((BM, BN), tl.float32)  # how many positives a negative beats
                gain = tl.zeros((BM, BN), tl.float32)  # and by how much in all
                for k in range(0, most):
                    threshold = tl.load(listed + known * cap + k, mask=k < positives, other=INF) - margin
                    by = x - threshold[:, None]
                    w += tl.where(by > 0, 1.0, 0.0)
                    gain += tl.maximum(by, 0.0)
                    hits = tl.sum((by > 0).to(tl.int32), 1)
                    # whole numbers: their sum is the same in any order
                    tl.atomic_add(beaten + known * cap + k, hits, mask=(hits > 0) & (i < m) & (part == 0), sem="relaxed")
                value += tl.sum(gain, 1)
                extra += tl.sum(w, 1)
            if SCALE != 1:
                w = w * SCALE
            if ALWAYS:
                rounded = w.to(v.dtype)
                if KIND >= MULTI_SIMILARITY:
                    acc = tl.dot(tl.trans(v), tl.trans((w - rounded.to(tl.float32)).to(v.dtype)), acc)
            else:
                acc = add_product(acc, w, v, HALF, KIND >= MULTI_SIMILARITY, PRECISION)
        if ALWAYS:
            acc = tl.dot(tl.trans(v), tl.trans(rounded), acc)

    if HALF:
        to = (split.to(tl.int64) * m + known[None, :]) * D + d[:, None]
        tl.store(work + to, acc, mask=(i < m)[None, :] & (d < D)[:, None])
    else:
        to = (split.to(tl.int64) * m + known[:, None]) * D + d[None, :]
        tl.store(work + to, acc, mask=(i < m)[:, None] & (d < D)[None, :])
    mine = (i < m) & (part == 0)
    to_sums = sums_in(work, m, splits, D) + i * splits + split
    field = m * splits
    tl.store(to_sums + VALUE * field, value, mask=mine)
    tl.store(to_sums + NEGATIVES * field, negatives, mask=mine)
    tl.store(to_sums + EXTRA * field, extra, mask=mine)
    tl.store(to_sums + HARDEST * field, hardest, mask=mine)
    tl.store(to_sums + EASIEST_POSITIVE * field, easiest_positive, mask=mine)
    tl.store(to_sums + HARDEST_POSITIVE * field, hardest_positive, mask=mine)
    if (tl.program_id(0) == 0) & (split == 0):
        tl.store(counter_in(work, m, splits, D), 0)
