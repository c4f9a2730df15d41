# mypy: disable-error-code="no-untyped-def"
"""The pass over the bank: every tile of rows is read once, compared with the anchors, weighed and added to their gradients.

A program takes a block of anchors and a contiguous part of the rows, keeps the anchors' gradient in registers (for half
banks transposed, so that the tensor cores take both operands from shared memory) and writes it once at the end; `finish`
adds up the parts in fixed order. After the first product one look tells whether any pair of the tile can count (a negative
above its anchor's floor or, where positives are not listed, a shared label); if none does, the tile is done. With statistics
the hardest negative is wanted as well, so pairs are told apart in every tile. Labels, ids and stamps are numbers of 64
bits; compared by their halves they take half the registers. EARLY: they are fetched ahead for every tile, which pays where
many tiles have valid pairs (small banks) and costs where few have.

NARROW keeps whole rows on chip for both products. Otherwise (wide rows) similarities are summed over steps of BK columns
and a program adds up DS columns of the gradient. Weights enter the second product times SCALE, which keeps ranks and
exponentials inside float16. RISES: exponents may pass what numbers hold, so that sums must be rescaled on the way. APART: the
positives met on the way have a gradient of their own, for reductions that weigh the two sides once all pairs are counted.
"""

import triton
import triton.language as tl

from xbm.kernels.launch import await_others

from xbm.engine.triton.tiles import (  # isort: skip
    BOTH, CONTRASTIVE, EASIEST_POSITIVE, EXTRA, HARDEST, HARDEST_POSITIVE, INF, MULTI_SIMILARITY, NEGATIVES, NO_SLOT, PULL,
    SIZES, TRIPLET, VALUE, counter_in, halves, own_slots, similarities, sums_in,
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
def anchors_of_block(anchors, rows, work, i, known, d, split, m, D: tl.constexpr, HALF: tl.constexpr):
    """(BM, DS): a block of anchors in the rows' type.

    The tensor cores take them from shared memory only if they come straight out of a load: so rounded ones go where this
    program's gradient will be written at the end, and are read from there.
    """
    inside = (i < m)[:, None] & (d < D)[None, :]
    a = tl.load(anchors + known.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
    if a.dtype == rows.dtype.element_ty:
        return a
    elif HALF:
        room = (work + split.to(tl.int64) * m * D).to(tl.pointer_type(rows.dtype.element_ty), bitcast=True)
        at = room + 2 * known.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(at, a.to(rows.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        return tl.load(at, mask=inside, other=0.0)
    else:
        return a.to(rows.dtype.element_ty)


@triton.jit
def who(base_row, n, live, stamps, row_labels, row_ids, BY_ID: tl.constexpr, PADDED: tl.constexpr):
    """What tells the rows of a tile apart: whether they were written, and their labels and ids by halves."""
    written = words(halves(stamps) + 2 * base_row + 1, n, live, PADDED)
    of = halves(row_labels) + 2 * base_row
    row_low, row_high = words(of, n, live, PADDED), words(of + 1, n, live, PADDED)
    if BY_ID:
        of = halves(row_ids) + 2 * base_row
        return written, row_low, row_high, words(of, n, live, PADDED), words(of + 1, n, live, PADDED)
    else:
        return written, row_low, row_high, row_low, row_high


@triton.jit
def apart(
    x,
    written,
    row_low,
    row_high,
    other_low,
    other_high,
    label_low,
    label_high,
    id_low,
    id_high,
    slot,
    n,
    BY_ID: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    """Tells the pairs of a tile apart: -inf in x for rows that do not count and for the anchor itself; which share a label."""
    x += tl.where(written >= 0, 0.0, -INF)[None, :]
    if BY_ID:
        x = tl.where(((other_low[None, :] ^ id_low[:, None]) | (other_high[None, :] ^ id_high[:, None])) == 0, -INF, x)
    if BY_SLOT != NO_SLOT:
        x = tl.where(n[None, :] == slot[:, None], -INF, x)
    return x, ((row_low[None, :] ^ label_low[:, None]) | (row_high[None, :] ^ label_high[:, None])) == 0


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
    counts, lowest, listed, beaten,  # of the positives: (m,), (m,), (m, cap), (m, cap), see positives.py
    work,  # out, see tiles.py
    pulls,  # out, (splits, m, D): the positives' part of the gradients, or None
    described,  # the rows as the copy engine wants them, or None
    m, M, per, splits, cap, margin, beta, base,
    KIND: tl.constexpr, STATS: tl.constexpr, BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PADDED: tl.constexpr, RISES: tl.constexpr,
    HEADROOM: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    await_others()
    slices: tl.constexpr = (D + DS - 1) // DS
    part = tl.program_id(0) % slices
    i = tl.program_id(0) // slices * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    known = tl.minimum(i, m - 1)
    d = part * DS + tl.arange(0, DS)
    n = tl.arange(0, BN)

    label = tl.load(labels + known)
    label_low, label_high = label.to(tl.int32), (label >> 32).to(tl.int32)
    anchor_id = tl.load(ids + known) if BY_ID else label
    id_low, id_high = anchor_id.to(tl.int32), (anchor_id >> 32).to(tl.int32)
    slots = own_slots(own, pointer, known, m, M, BY_SLOT)

    floor = tl.full((BM,), margin, tl.float32)
    if KIND >= MULTI_SIMILARITY:
        floor = tl.load(lowest + known) - margin
    if KIND == TRIPLET:
        positives = tl.load(counts + known)
        floor = tl.where(positives > cap, INF, floor)  # crowded.py sees to those
        positives = tl.where(positives > cap, 0, positives)
        most = tl.max(positives, 0)
    floor = tl.where(i < m, floor, INF)

    if NARROW:
        a = anchors_of_block(anchors, rows, work, i, known, d, split, m, D, HALF)
    acc = tl.zeros((DS, BM) if HALF else (BM, DS), tl.float32)
    pulled = tl.zeros(((DS, BM) if HALF else (BM, DS)) if APART else (1, 1), tl.float32)
    value = tl.zeros((BM,), tl.float32)
    pull = tl.zeros((BM,), tl.float32)
    extra = tl.zeros((BM,), tl.float32)
    negatives = tl.zeros((BM,), tl.float32)
    hardest = tl.full((BM,), -INF, tl.float32)
    hardest_of_column = tl.full((BM, BN) if STATS else (1, 1), -INF, tl.float32)
    easiest_positive = tl.full((BM,), -INF, tl.float32)
    hardest_positive = tl.full((BM,), INF, tl.float32)

    first = split.to(tl.int64) * per
    last = tl.minimum(first + per, M)
    todo = (last - first).to(tl.int32)
    # The number of stages is given here because then tiles are fetched ahead whoever uses them, not only for a product
    # that is made for every tile.
    for start in tl.range(0, todo, BN, num_stages=STAGES):
        # A tile at the bank's end starts early enough to lie inside, so that nothing needs a mask but the rows met before.
        base_row = first + start
        if PADDED:
            live = n < todo - start
        else:
            base_row = tl.minimum(base_row, M - BN)
            live = (n >= (first + start - base_row).to(tl.int32)) & (n < (last - base_row).to(tl.int32))
        tile = rows + base_row * D
        if EARLY:
            written, row_low, row_high, other_low, other_high = who(
                base_row, n, live, stamps, row_labels, row_ids, BY_ID, PADDED
            )
        elif KIND == BOTH:
            row_low = words(halves(row_labels) + 2 * base_row, n, live, PADDED)
        if NARROW:
            if described is None:
                v = rows_of_tile(tile, n, d, live, D, DS, PADDED)
            else:
                v = described.load([base_row.to(tl.int32), 0])
            product = tl.dot(a, tl.trans(v), input_precision=PRECISION)
        else:
            product = similarities(anchors, tile, known, n, i < m, live, D, BM, BN, BK, PRECISION)
        if HALF:
            S = tl.full((BM, BN), -INF, tl.float32)
            if start < todo:  # always; a compiler that saw two products in a row would lay out all warps along the anchors
                S = product + tl.where(live, 0.0, -INF)[None, :]
        else:
            S = product + tl.where(live, 0.0, -INF)[None, :]
        anchor = label_low, label_high, id_low, id_high, slots - base_row.to(tl.int32)
        if STATS:
            x, same = apart(S, written, row_low, row_high, other_low, other_high, *anchor, n, BY_ID, BY_SLOT)
            hardest_of_column = tl.maximum(hardest_of_column, tl.where(same, -INF, x))
            above = tl.where(same, -INF, x) - floor[:, None]
            if KIND == BOTH:
                above = tl.where(same & (x > -INF), INF, above)
        else:
            above = S - floor[:, None]
            if KIND == BOTH:
                above = tl.where(row_low[None, :] == label_low[:, None], INF, above)
        if tl.max(above) > 0:
            if not EARLY:
                row = who(base_row, n, live, stamps, row_labels, row_ids, BY_ID, PADDED)
                x, same = apart(S, *row, *anchor, n, BY_ID, BY_SLOT)
            elif not STATS:
                x, same = apart(S, written, row_low, row_high, other_low, other_high, *anchor, n, BY_ID, BY_SLOT)
            if not NARROW:
                v = rows_of_tile(tile, n, d, live, D, DS, PADDED)
            if KIND == BOTH:
                positive = same & (x > -INF)
                valid = (x > floor[:, None]) & (same == 0)
                if APART:
                    w = tl.where(valid, 1.0, 0.0)
                    value += tl.sum(tl.where(valid, x - margin, 0.0), 1)
                    pull += tl.sum(tl.where(positive, 1.0 - x, 0.0), 1)
                    pulled = add_product(pulled, tl.where(positive, 1.0, 0.0), v, HALF, False, PRECISION)
                else:
                    w = tl.where(positive, -1.0, tl.where(valid, 1.0, 0.0))
                    value += tl.sum(tl.where(positive, 1.0 - x, tl.where(valid, x - margin, 0.0)), 1)
                if STATS or APART:
                    negatives += tl.sum(valid.to(tl.float32), 1)
                    extra += tl.sum(positive.to(tl.float32), 1)
                if STATS:
                    easiest_positive = tl.maximum(easiest_positive, tl.max(tl.where(positive, x, -INF), 1))
                    hardest_positive = tl.minimum(hardest_positive, tl.min(tl.where(positive, x, INF), 1))
            else:
                x = tl.where(same, -INF, x)
                valid = x > floor[:, None]
                negatives += tl.sum(valid.to(tl.float32), 1)
            if KIND == CONTRASTIVE:
                w = tl.where(valid, 1.0, 0.0)
                value += tl.sum(tl.where(valid, x - margin, 0.0), 1)
            elif KIND == MULTI_SIMILARITY:
                if not STATS:
                    hardest = tl.maximum(hardest, tl.max(x, 1))
                # extra: the exponent that an anchor's terms are measured from. It starts at the zero logit and moves
                # only when a term would leave the range of numbers: for common constants never.
                logit = beta * (x - base)
                if RISES:
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
            elif KIND == TRIPLET:
                w = tl.zeros((BM, BN), tl.float32)  # how many positives a negative beats
                gain = tl.zeros((BM, BN), tl.float32)  # and by how much in all
                for k in range(0, most, 4):
                    hits = tl.zeros((BM, BN), tl.int32)  # of four positives, a byte each: a tile has at most 64 rows
                    for of_four in tl.static_range(4):
                        here = k + of_four < positives
                        threshold = tl.load(listed + known * cap + k + of_four, mask=here, other=INF) - margin
                        by = x - threshold[:, None]
                        w += tl.where(by > 0, 1.0, 0.0)
                        gain += tl.maximum(by, 0.0)
                        hits += tl.where(by > 0, 1 << (8 * of_four), 0)
                    counted = tl.sum(hits, 1)
                    for of_four in tl.static_range(4):
                        these = (counted >> (8 * of_four)) & 255
                        # whole numbers: their sum is the same in any order
                        mine = (these > 0) & (i < m) & (part == 0)
                        tl.atomic_add(beaten + known * cap + k + of_four, these, mask=mine, sem="relaxed")
                value += tl.sum(gain, 1)
                extra += tl.sum(w, 1)
            if SCALE != 1:
                w = w * SCALE
            acc = add_product(acc, w, v, HALF, KIND >= MULTI_SIMILARITY, PRECISION)

    if STATS:
        hardest = tl.max(hardest_of_column, 1)
    if HALF:
        to = (split.to(tl.int64) * m + known[None, :]) * D + d[:, None]
        inside = (i < m)[None, :] & (d < D)[:, None]
    else:
        to = (split.to(tl.int64) * m + known[:, None]) * D + d[None, :]
        inside = (i < m)[:, None] & (d < D)[None, :]
    tl.store(work + to, acc, mask=inside)
    if APART:
        tl.store(pulls + to, pulled, mask=inside)
    mine = (i < m) & (part == 0)
    to_sums = sums_in(work, m, splits, D) + i * splits + split
    field = m * splits
    tl.store(to_sums + VALUE * field, value, mask=mine)
    tl.store(to_sums + NEGATIVES * field, negatives, mask=mine)
    tl.store(to_sums + EXTRA * field, extra, mask=mine)
    tl.store(to_sums + HARDEST * field, hardest, mask=mine)
    tl.store(to_sums + EASIEST_POSITIVE * field, easiest_positive, mask=mine)
    tl.store(to_sums + HARDEST_POSITIVE * field, hardest_positive, mask=mine)
    if APART:
        tl.store(to_sums + PULL * field, pull, mask=mine)
    if (tl.program_id(0) == 0) & (split == 0):
        tl.store(counter_in(work, m, splits, D), 0)
