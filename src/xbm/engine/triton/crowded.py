# mypy: disable-error-code="no-untyped-def"
"""The triplet loss of an anchor that has more positives than a list holds: exact, and slow.

One program takes one such anchor (all others return at once) and goes through its positives a list at a time: it lists
them, compares every negative with them, adds their gradients, and goes on. What a negative's rank gains from one list does
not depend on the others, so the sums are those of one long list.
"""

import triton
import triton.language as tl

from xbm.kernels.launch import await_others

from xbm.engine.triton.tiles import (  # isort: skip
    CROWD_NEGATIVES, CROWD_POSITIVES, CROWD_TRIPLETS, CROWD_VALUE, SIZES,
    may_meet, own_slots, positives_among, similarities_of_one,
)  # fmt: skip


@triton.jit
def add_rows(gradient, rows, i, j, w, which, D: tl.constexpr, BK: tl.constexpr):
    """gradient[i] += Σ w·row, for the marked rows."""
    tl.debug_barrier()
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        of_v = rows + j.to(tl.int64)[:, None] * D + d[None, :]
        v = tl.load(of_v, mask=which[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        of_g = gradient + i.to(tl.int64) * D + d
        tl.store(of_g, tl.load(of_g, mask=d < D, other=0.0) + tl.sum(w[:, None] * v, 0), mask=d < D)
    tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def crowded(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    totals, lowest, listed, places, beaten,
    crowd, crowd_gradient,  # out: fields of (m,), (m, D)
    m, M, cap, margin,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    await_others()
    i = tl.program_id(0)
    me = i + tl.arange(0, 1)
    many = tl.load(totals + i)
    if many > cap:
        for start in range(0, D, BK):
            d = start + tl.arange(0, BK)
            tl.store(crowd_gradient + i.to(tl.int64) * D + d, tl.zeros((BK,), tl.float32), mask=d < D)
        slot = own_slots(own, pointer, me, m, M, BY_SLOT)
        anchor_id = tl.load(ids + me) if BY_ID else slot
        label = tl.load(labels + i)
        floor = tl.load(lowest + i) - margin
        value = 0.0
        triplets = 0.0
        negatives = 0.0
        positives = 0.0
        list_ = listed + i * cap
        for done in range(0, many, cap):
            size = tl.minimum(many - done, cap)
            seen = -done
            tl.debug_barrier()
            for start in range(0, M, BN):  # list the next positives
                j = start + tl.arange(0, BN)
                here = j < M
                good = positives_among(j, here, row_labels, stamps, row_ids, label, anchor_id, slot, BY_ID, BY_SLOT, False)
                if tl.max(good.to(tl.int32), 0) > 0:
                    at = seen + tl.cumsum(good.to(tl.int32), 0) - 1
                    seen += tl.sum(good.to(tl.int32), 0)
                    good = good & (at >= 0) & (at < cap)
                    if tl.max(good.to(tl.int32), 0) > 0:
                        tl.store(list_ + at, similarities_of_one(anchors, rows, i, j, good, D, BN, BK), mask=good)
                        tl.store(places + i * cap + at, j, mask=good)
                        tl.store(beaten + i * cap + at, tl.zeros((BN,), tl.int32), mask=good)
            tl.debug_barrier()
            for start in range(0, M, BN):  # every negative against them
                j = start + tl.arange(0, BN)
                here = j < M
                good = here & (tl.load(row_labels + j, mask=here, other=0) != label)
                free = may_meet(j, here, stamps, row_ids, anchor_id, slot, BY_ID, BY_SLOT)
                good = good & (tl.max(free.to(tl.int32), 0) > 0)
                s = similarities_of_one(anchors, rows, i, j, good, D, BN, BK)
                good = good & (s > floor)
                if tl.max(good.to(tl.int32), 0) > 0:
                    rank = tl.zeros((BN,), tl.float32)
                    for part in range(0, size, BP):
                        k = part + tl.arange(0, BP)
                        threshold = tl.load(list_ + k, mask=k < size, other=0.0) - margin
                        by = tl.where(good[:, None] & (k < size)[None, :], s[:, None] - threshold[None, :], 0.0)
                        rank += tl.sum((by > 0).to(tl.float32), 1)
                        value += tl.sum(tl.sum(tl.maximum(by, 0.0), 1), 0)
                        hits = tl.sum((by > 0).to(tl.int32), 0)
                        tl.atomic_add(beaten + i * cap + k, hits, mask=k < size, sem="relaxed")
                    triplets += tl.sum(rank, 0)
                    add_rows(crowd_gradient, rows, i, j, rank, good, D, BK)
                if done == 0:
                    negatives += tl.sum(good.to(tl.float32), 0)
            tl.debug_barrier()
            for part in range(0, size, BN):  # and their own gradients
                k = part + tl.arange(0, BN)
                w = tl.load(beaten + i * cap + k, mask=k < size, other=0, cache_modifier=".cg").to(tl.float32)
                j = tl.load(places + i * cap + k, mask=k < size, other=0)
                positives += tl.sum((w > 0).to(tl.float32), 0)
                add_rows(crowd_gradient, rows, i, j, -w, k < size, D, BK)
        tl.store(crowd + CROWD_VALUE * m + i, value)
        tl.store(crowd + CROWD_TRIPLETS * m + i, triplets)
        tl.store(crowd + CROWD_NEGATIVES * m + i, negatives)
        tl.store(crowd + CROWD_POSITIVES * m + i, positives)
