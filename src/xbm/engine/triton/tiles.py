# mypy: disable-error-code="no-untyped-def"
"""What all kernels share: which rows an anchor may meet, similarities of a tile, and where the parts of a step are written.

Names in the kernels: i numbers anchors, j rows, d columns. BM, BN, BK, DS are how many of them a tile has. An anchor is
left out of its own pairs BY_ID (rows with its instance id) or BY_SLOT (one row): a given slot, the queue's newest rows, or
the anchor's own place in the batch.
"""

import triton
import triton.language as tl

SIZES = [
    "m",
    "M",
    "per",
    "splits",
    "scans",
    "group",
    "cap",
]  # numbers that change from call to call must not lead to new kernels
INF = tl.constexpr(float("inf"))
NO_SLOT, GIVEN_SLOT, NEWEST_ROWS, SAME_PLACE = (tl.constexpr(x) for x in range(4))
BOTH, CONTRASTIVE, MULTI_SIMILARITY, TRIPLET = (tl.constexpr(x) for x in range(4))  # BOTH: contrastive in one pass
SUM, MEAN, BALANCED = (tl.constexpr(x) for x in range(3))  # reductions

# `work`, float32: the gradients (splits, m, D), then `sums`, `found` and a counter.
# Fields of `sums`, each (m, splits): what one program found of one anchor.
VALUE, NEGATIVES, EXTRA, HARDEST, EASIEST_POSITIVE, HARDEST_POSITIVE, PULL = (tl.constexpr(x) for x in range(7))
SUMS = tl.constexpr(7)
# Fields of `found`, each (m,): what is known of an anchor at the end.
LOSS, SOUND, OF_NEGATIVE, OF_POSITIVE, NEGATIVE_PEAK, POSITIVE_PEAK, FLOOR, CEILING = (tl.constexpr(x) for x in range(8))
FOUND = tl.constexpr(8)
# Fields of `crowd`, each (m,): what the slow path found of an anchor with too many positives to list.
CROWD_VALUE, CROWD_TRIPLETS, CROWD_NEGATIVES, CROWD_POSITIVES = (tl.constexpr(x) for x in range(4))
CROWD = 4


@triton.jit
def halves(pointer):
    """An int64 pointer as int32: low words at even places, high words at odd ones."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def sums_in(work, m, splits, D: tl.constexpr):
    return work + splits * m * D


@triton.jit
def found_in(work, m, splits, D: tl.constexpr):
    return work + splits * m * D + SUMS * m * splits


@triton.jit
def counter_in(work, m, splits, D: tl.constexpr):
    return (found_in(work, m, splits, D) + FOUND * m).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def own_slots(own, pointer, i, m, M, BY_SLOT: tl.constexpr):
    """The row that is the anchor itself, -1 if there is none."""
    slot = i - i - 1
    if BY_SLOT == GIVEN_SLOT:
        slot = tl.load(own + i).to(tl.int32)
    if BY_SLOT == NEWEST_ROWS:
        back = m - i  # how many rows ago it was written
        slot = tl.load(pointer).to(tl.int32) - back
        slot = tl.where(slot < 0, slot + M, slot)
        slot = tl.where(back <= M, slot, -1)
    if BY_SLOT == SAME_PLACE:
        slot = i
    return slot


@triton.jit
def may_meet(j, here, stamps, row_ids, anchor_ids, slots, BY_ID: tl.constexpr, BY_SLOT: tl.constexpr):
    """(BM or 1, BN): rows that were written and are not the anchor itself. `anchor_ids` and `slots` are (BM,)."""
    good = (tl.load(stamps + j, mask=here, other=-1) >= 0)[None, :]
    if BY_ID:
        good = good & (tl.load(row_ids + j, mask=here, other=-1)[None, :] != anchor_ids[:, None])
    if BY_SLOT != NO_SLOT:
        good = good & (j[None, :] != slots[:, None])
    return good


@triton.jit
def positives_among(
    j, here, row_labels, stamps, row_ids, label, anchor_id, slot, BY_ID: tl.constexpr, BY_SLOT: tl.constexpr,
    LIKELY: tl.constexpr,
):  # fmt: skip
    """(BN,): which of some rows are positives of one anchor. `anchor_id` and `slot` are (1,).

    `LIKELY`: that there are some is known, or else few blocks hold one, and the rest is read only for those.
    """
    good = here & (tl.load(row_labels + j, mask=here, other=0) == label)
    if LIKELY or tl.max(good.to(tl.int32), 0) > 0:
        free = may_meet(j, here, stamps, row_ids, anchor_id, slot, BY_ID, BY_SLOT)
        good = good & (tl.max(free.to(tl.int32), 0) > 0)
    return good


@triton.jit
def similarities(
    anchors, rows, i, j, here_i, here_j, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BM, BN): products of some anchors with some rows, BK columns at a time.

    What rounding takes from a float32 sum is carried along (Kahan): over thousands of columns it would pass what a loss that
    exponentiates fifty times the similarity can bear.
    """
    S = tl.zeros((BM, BN), tl.float32)
    lost = tl.zeros((BM, BN), tl.float32)
    of_i = i.to(tl.int64)[:, None] * D
    of_j = j.to(tl.int64)[:, None] * D
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        a = tl.load(anchors + of_i + d[None, :], mask=here_i[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(rows + of_j + d[None, :], mask=here_j[:, None] & (d < D)[None, :], other=0.0)
        if v.dtype == tl.float32:
            more = tl.dot(a.to(v.dtype), tl.trans(v), input_precision=PRECISION) - lost
            total = S + more
            lost = (total - S) - more
            S = total
        else:
            S = tl.dot(a.to(v.dtype), tl.trans(v), S)
    return S


@triton.jit
def similarities_of_one(anchors, rows, i, j, which, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """(BN,): products of one anchor with the marked rows."""
    products = tl.zeros((BN, BK), tl.float32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        a = tl.load(anchors + i.to(tl.int64) * D + d, mask=d < D, other=0.0)
        v = tl.load(rows + j.to(tl.int64)[:, None] * D + d[None, :], mask=which[:, None] & (d < D)[None, :], other=0.0)
        products += v.to(tl.float32) * a.to(v.dtype).to(tl.float32)[None, :]
    return tl.sum(products, 1)


@triton.jit
def log_of_one_plus(mass, peak):
    """log(1 + Σ e^logit) from mass = Σ e^{logit − peak}, peak ≥ 0; exact for tiny sums too."""
    u = 1.0 + mass
    small = tl.where(u == 1.0, mass, tl.log(u) * (mass / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(peak > 0, peak + tl.log(tl.exp(-peak) + mass), small)
