# mypy: disable-error-code="no-untyped-def"
"""The gradient in the rows, once the coefficients of every anchor are known: ∂L/∂v_j = Σ_i w_ij·a_i.

For the back-propagation update of the memory, and for the batch against itself, where the rows are the anchors.
"""

import triton
import triton.language as tl

from xbm.engine.triton.finish import is_sound
from xbm.kernels.launch import await_others

from xbm.engine.triton.tiles import (  # isort: skip
    CEILING, FLOOR, INF, MULTI_SIMILARITY, NEGATIVE_PEAK, OF_NEGATIVE, OF_POSITIVE, POSITIVE_PEAK, SIZES, TRIPLET,
    found_in, may_meet, own_slots, similarities,
)  # fmt: skip


@triton.jit
def clean(
    given, ids, given_sound,
    kept, stamps,  # out: (m, D) with zeros for an unsound anchor, (m,) with -1 for it
    tolerance, D: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The anchors as rows: an unsound one must neither be met nor spread its NaN through a product."""
    await_others()
    i = tl.program_id(0)
    sound = is_sound(given, i, ids, given_sound, tolerance, D, HAS_IDS, HAS_SOUND, BK)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        at = i.to(tl.int64) * D + d
        x = tl.load(given + at, mask=d < D, other=0.0)
        tl.store(kept + at, tl.where(sound, x, 0.0).to(kept.dtype.element_ty), mask=d < D)
    tl.store(stamps + i, tl.where(sound, 0, -1).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def spread(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    totals, listed, places, beaten, work,
    gradient,  # (m, D), added where rows are the anchors
    of_rows,  # out: (M, D)
    m, M, splits, cap, margin, alpha, beta, base,
    KIND: tl.constexpr, ADD: tl.constexpr, BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_others()
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    here = j < M
    d = tl.program_id(1) * DS + tl.arange(0, DS)
    row_label = tl.load(row_labels + j, mask=here, other=0)
    acc = tl.zeros((BN, DS), tl.float32)
    found = found_in(work, m, splits, D)
    for block in range(0, m, BM):
        i = block + tl.arange(0, BM)
        known = tl.minimum(i, m - 1)
        anchor_ids = tl.load(ids + known) if BY_ID else tl.load(labels + known)
        slots = own_slots(own, pointer, known, m, M, BY_SLOT)
        same = row_label[None, :] == tl.load(labels + known)[:, None]
        good = may_meet(j, here, stamps, row_ids, anchor_ids, slots, BY_ID, BY_SLOT) & (i < m)[:, None]
        S = similarities(anchors, rows, known, j, i < m, here, D, BM, BN, BK, PRECISION)
        of_negative = tl.load(found + OF_NEGATIVE * m + known)[:, None]
        of_positive = tl.load(found + OF_POSITIVE * m + known)[:, None]
        hot = good & (tl.load(found + FLOOR * m + known)[:, None] < S)
        if KIND == MULTI_SIMILARITY:
            peak = tl.load(found + NEGATIVE_PEAK * m + known)[:, None]
            negative = of_negative * tl.exp(tl.where(hot, beta * (S - base) - peak, -INF))
            peak = tl.load(found + POSITIVE_PEAK * m + known)[:, None]
            near = good & (tl.load(found + CEILING * m + known)[:, None] > S)
            positive = of_positive * tl.exp(tl.where(near, -alpha * (S - base) - peak, -INF))
        elif KIND == TRIPLET:
            each = tl.where(i < m, tl.load(totals + known), 0)
            negative = tl.zeros((BM, BN), tl.float32)
            positive = tl.zeros((BM, BN), tl.float32)
            for k in range(0, tl.max(each, 0)):
                p = tl.load(listed + known * cap + k, mask=k < each, other=INF)
                at = tl.load(places + known * cap + k, mask=k < each, other=-1)
                times = tl.load(beaten + known * cap + k, mask=k < each, other=0).to(tl.float32)
                negative += tl.where((p - margin)[:, None] < S, 1.0, 0.0)
                positive += tl.where(j[None, :] == at[:, None], times[:, None], 0.0)
            negative = of_negative * tl.where(hot, negative, 0.0)
            positive = of_positive * positive
        else:
            negative = tl.where(hot, of_negative, 0.0)
            positive = of_positive + tl.zeros((BM, BN), tl.float32)
        w = tl.where(good, tl.where(same, -positive, negative), 0.0)
        of_a = anchors + known.to(tl.int64)[:, None] * D + d[None, :]
        a = tl.load(of_a, mask=(i < m)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(tl.trans(w), a, acc, input_precision=PRECISION)
    at = j.to(tl.int64)[:, None] * D + d[None, :]
    inside = here[:, None] & (d < D)[None, :]
    if ADD:
        acc += tl.load(gradient + at, mask=inside, other=0.0)
    tl.store(of_rows + at, acc.to(of_rows.dtype.element_ty), mask=inside)
