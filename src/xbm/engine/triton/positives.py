# mypy: disable-error-code="no-untyped-def"
"""The positives first: kernels that count and list the rows that share an anchor's label.

Positives are few, so they are found by looking at the labels (8 bytes a row): `mark` puts the anchors into a small table by
their labels, `count` looks every row's label up there and counts, for each part of the bank, the rows that share it, and
`enlist`, one program an anchor, goes through the parts that hold some. Counting needs no order and listing gives the same one
every time. Anchors of one label share its counts; where two labels fall on the same place of the table, their rows are compared
with every anchor. A list holds cap entries. Of an anchor with more, the count and the extreme similarities are still exact,
and the kernels that read the list find the anchor's positives by scanning again.
"""

import triton
import triton.language as tl

from xbm.engine.triton.tiles import INF, SIZES, own_slots, positives_among, similarities_of_one
from xbm.kernels.launch import await_others

FREE = tl.constexpr(0)  # places of the table: nobody, the number of an anchor plus one, or several labels
SEVERAL = tl.constexpr(-1)


@triton.jit
def place_in_table(label, PLACES: tl.constexpr):
    mixed = (label ^ (label >> 32)).to(tl.int32) * -1640531527  # 2³² / golden ratio: neighbours end up far apart
    return (mixed >> 12) & (PLACES - 1)


@triton.jit(do_not_specialize=SIZES)
def mark(
    labels,
    table,  # out: (PLACES,)
    counts,  # out: (m, scans), zeros
    m, scans, PLACES: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Program 0 makes the table, the others clear the counts."""
    await_others()
    block = tl.program_id(0)
    if block > 0:
        at = (block - 1).to(tl.int64) * BT + tl.arange(0, BT)
        tl.store(counts + at, tl.zeros((BT,), tl.int32), mask=at < m.to(tl.int64) * scans)
    else:
        for start in range(0, PLACES, BT):
            tl.store(table + start + tl.arange(0, BT), tl.full((BT,), FREE, tl.int16))
        tl.debug_barrier()
        for start in range(0, m, BM):
            i = start + tl.arange(0, BM)
            place = place_in_table(tl.load(labels + i, mask=i < m, other=0), PLACES)
            tl.store(table + place, (i + 1).to(tl.int16), mask=i < m)
        tl.debug_barrier()
        for start in range(0, m, BM):
            i = start + tl.arange(0, BM)
            label = tl.load(labels + i, mask=i < m, other=0)
            place = place_in_table(label, PLACES)
            owner = tl.load(table + place, mask=i < m, other=0).to(tl.int32)
            other = tl.load(labels + tl.maximum(owner - 1, 0), mask=i < m, other=0)
            tl.store(table + place, tl.full((BM,), SEVERAL, tl.int16), mask=(i < m) & (other != label))


@triton.jit(do_not_specialize=SIZES)
def count(row_labels, labels, table, counts, m, M, per, scans, PLACES: tl.constexpr, BN: tl.constexpr):
    """counts: (m, scans), changed in place: rows of each part that share a label, under one of the anchors with it."""
    await_others()
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    here = j < M
    row_label = tl.load(row_labels + j, mask=here, other=0)
    owner = tl.load(table + place_in_table(row_label, PLACES), mask=here, other=0).to(tl.int32)
    same = (owner > 0) & (tl.load(labels + tl.maximum(owner - 1, 0), mask=owner > 0, other=0) == row_label) & here
    one = tl.full((BN,), 1, tl.int32)
    part = j // per
    tl.atomic_add(counts + tl.maximum(owner - 1, 0).to(tl.int64) * scans + part, one, mask=same, sem="relaxed")
    several = here & (owner < 0)
    if tl.max(several.to(tl.int32), 0) > 0:
        for i in range(0, m):
            mine = several & (row_label == tl.load(labels + i))
            tl.atomic_add(counts + i * scans + part, one, mask=mine, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def enlist(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    table, counts,
    totals, lowest, highest,  # out: (m,), how many positives an anchor has, and their extreme similarities
    listed, places, beaten,  # out: (m, cap), similarities, rows, and zeros to count in
    m, M, per, scans, group, cap,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr, PLACES: tl.constexpr,
    SP: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
    ONE: tl.constexpr,  # whether the parts taken at a time are one block of rows, so that each block holds a row of the label
):  # fmt: skip
    await_others()
    i = tl.program_id(0)
    me = i + tl.arange(0, 1)
    label = tl.load(labels + i)
    slot = own_slots(own, pointer, me, m, M, BY_SLOT)
    anchor_id = tl.load(ids + me) if BY_ID else slot
    owner = tl.load(table + place_in_table(label, PLACES)).to(tl.int32)
    owner = tl.where(owner > 0, owner - 1, i)
    scan = tl.arange(0, SP)
    each = tl.load(counts + owner.to(tl.int64) * scans + scan, mask=scan < scans, other=0)
    at_most = tl.sum(each, 0)  # the anchor itself and rows that do not count among them
    seen = 0
    low = INF
    high = -INF
    at_part = tl.min(tl.where(each > 0, scan, SP), 0)
    while at_part < SP:
        last = tl.minimum((at_part + group) * per, M)
        for start in range(at_part * per, last, BN):
            j = start + tl.arange(0, BN)
            here = j < last
            good = positives_among(j, here, row_labels, stamps, row_ids, label, anchor_id, slot, BY_ID, BY_SLOT, ONE)
            more = tl.sum(good.to(tl.int32), 0)
            if more > 0:
                at = seen + tl.cumsum(good.to(tl.int32), 0) - 1
                tl.store(places + i * cap + at, j, mask=good & (at < cap))
                seen += more
                if at_most > cap:  # perhaps not all of them will be in the list
                    for part in range(0, BN, BP):
                        some = start + part + tl.arange(0, BP)
                        inside = some < last
                        these = positives_among(
                            some, inside, row_labels, stamps, row_ids, label, anchor_id, slot, BY_ID, BY_SLOT, True
                        )
                        if tl.max(these.to(tl.int32), 0) > 0:
                            s_some = similarities_of_one(anchors, rows, i, some, these, D, BP, BK)
                            low = tl.minimum(low, tl.min(tl.where(these, s_some, INF), 0))
                            high = tl.maximum(high, tl.max(tl.where(these, s_some, -INF), 0))
        at_part = tl.min(tl.where((each > 0) & (scan >= at_part + group), scan, SP), 0)
    tl.debug_barrier()
    for start in range(0, tl.minimum(seen, cap), BP):
        k = start + tl.arange(0, BP)
        good = k < tl.minimum(seen, cap)
        j = tl.load(places + i * cap + k, mask=good, other=0)
        s = similarities_of_one(anchors, rows, i, j, good, D, BP, BK)
        low = tl.minimum(low, tl.min(tl.where(good, s, INF), 0))
        high = tl.maximum(high, tl.max(tl.where(good, s, -INF), 0))
        tl.store(listed + i * cap + k, s, mask=good)
        tl.store(beaten + i * cap + k, tl.zeros((BP,), tl.int32), mask=good)
    tl.store(totals + i, seen)
    tl.store(lowest + i, low)
    tl.store(highest + i, high)
