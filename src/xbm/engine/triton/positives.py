# mypy: disable-error-code="no-untyped-def"
"""The positives first: kernels that count and list the rows that share an anchor's label.

Positives are few, so they are found by scanning the labels (8 bytes a row): `mark` notes the anchors' labels in a small table,
`count` looks every row's label up there and compares only blocks of rows that may hold a positive, and `enlist`, one program
an anchor, goes through the parts in which its positives are. Counting before listing needs no atomics and gives the same order
every time. A list holds cap entries. Of an anchor with more, the count and the extreme similarities are still exact, and the
kernels that read the list find the anchor's positives by scanning again.
"""

import triton
import triton.language as tl

from xbm.engine.triton.tiles import INF, SIZES, may_meet, own_slots, similarities_of_one


@triton.jit
def place_in_table(label, PLACES: tl.constexpr):
    mixed = (label ^ (label >> 32)).to(tl.int32) * -1640531527  # 2³² / golden ratio: neighbours end up far apart
    return (mixed >> 12) & (PLACES - 1)


@triton.jit(do_not_specialize=SIZES)
def mark(labels, table, m, PLACES: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr):
    """table: out, (PLACES,), 1 where an anchor's label falls and 0 elsewhere. One program."""
    for start in range(0, PLACES, BT):
        tl.store(table + start + tl.arange(0, BT), tl.zeros((BT,), tl.int8))
    tl.debug_barrier()
    for start in range(0, m, BM):
        i = start + tl.arange(0, BM)
        place = place_in_table(tl.load(labels + i, mask=i < m, other=0), PLACES)
        tl.store(table + place, tl.full((BM,), 1, tl.int8), mask=i < m)


@triton.jit(do_not_specialize=SIZES)
def count(
    row_labels, stamps, row_ids, labels, ids, own, pointer,  # who meets whom
    table,
    counts,  # out: (m, scans), positives that each program found
    m, M, per, scans,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, PLACES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    known = tl.minimum(i, m - 1)
    scan = tl.program_id(1)
    label = tl.load(labels + known)
    anchor_ids = tl.load(ids + known) if BY_ID else label
    slots = own_slots(own, pointer, known, m, M, BY_SLOT)
    first = scan * per
    last = tl.minimum(first + per, M)
    found = tl.zeros((BM,), tl.int32)
    for start in range(first, last, BN):
        block = start + tl.arange(0, BN)
        place = place_in_table(tl.load(row_labels + block, mask=block < last, other=0), PLACES)
        marked = tl.load(table + place, mask=block < last, other=0).to(tl.int32)
        some = tl.sum(marked, 0)
        if some > FEW:
            for part in range(start, tl.minimum(start + BN, last), SUB):
                j = part + tl.arange(0, SUB)
                here = j < last
                good = (tl.load(row_labels + j, mask=here, other=0)[None, :] == label[:, None]) & here[None, :]
                good = good & may_meet(j, here, stamps, row_ids, anchor_ids, slots, BY_ID, BY_SLOT)
                found += tl.sum(good.to(tl.int32), 1)
        elif some > 0:  # one by one
            at = start - 1
            for _ in range(0, some):
                at = tl.min(tl.where((marked > 0) & (block > at), block, last), 0)
                row = at + tl.arange(0, 1)
                met = may_meet(row, row < last, stamps, row_ids, anchor_ids, slots, BY_ID, BY_SLOT)
                met = met & (tl.load(row_labels + row)[None, :] == label[:, None])
                found += tl.sum(met.to(tl.int32), 1)
    tl.store(counts + i.to(tl.int64) * scans + scan, found, mask=i < m)


@triton.jit(do_not_specialize=SIZES)
def enlist(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    counts,
    totals, lowest, highest,  # out: (m,), how many positives an anchor has, and their extreme similarities
    listed, places, beaten,  # out: (m, cap), similarities, rows, and zeros to count in
    m, M, per, scans, group, cap,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    SP: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    me = i + tl.arange(0, 1)
    label = tl.load(labels + i)
    slot = own_slots(own, pointer, me, m, M, BY_SLOT)
    anchor_id = tl.load(ids + me) if BY_ID else slot
    scan = tl.arange(0, SP)
    each = tl.load(counts + i.to(tl.int64) * scans + scan, mask=scan < scans, other=0)
    many = tl.sum(each, 0)
    seen = 0
    low = INF
    high = -INF
    at_part = tl.min(tl.where(each > 0, scan, SP), 0)
    while at_part < SP:
        last = tl.minimum((at_part + group) * per, M)
        for start in range(at_part * per, last, BN):
            j = start + tl.arange(0, BN)
            here = j < last
            good = here & (tl.load(row_labels + j, mask=here, other=0) == label)
            if tl.max(good.to(tl.int32), 0) > 0:
                free = may_meet(j, here, stamps, row_ids, anchor_id, slot, BY_ID, BY_SLOT)
                good = good & (tl.max(free.to(tl.int32), 0) > 0)
                at = seen + tl.cumsum(good.to(tl.int32), 0) - 1
                tl.store(places + i * cap + at, j, mask=good & (at < cap))
                seen += tl.sum(good.to(tl.int32), 0)
                if many > cap:  # not all of them will be in the list
                    for part in range(0, BN, BP):
                        some = start + part + tl.arange(0, BP)
                        inside = some < last
                        these = inside & (tl.load(row_labels + some, mask=inside, other=0) == label)
                        met = may_meet(some, inside, stamps, row_ids, anchor_id, slot, BY_ID, BY_SLOT)
                        these = these & (tl.max(met.to(tl.int32), 0) > 0)
                        if tl.max(these.to(tl.int32), 0) > 0:
                            s_some = similarities_of_one(anchors, rows, i, some, these, D, BP, BK)
                            low = tl.minimum(low, tl.min(tl.where(these, s_some, INF), 0))
                            high = tl.maximum(high, tl.max(tl.where(these, s_some, -INF), 0))
        at_part = tl.min(tl.where((each > 0) & (scan >= at_part + group), scan, SP), 0)
    tl.debug_barrier()
    for start in range(0, tl.minimum(many, cap), BP):
        k = start + tl.arange(0, BP)
        good = k < tl.minimum(many, cap)
        j = tl.load(places + i * cap + k, mask=good, other=0)
        s = similarities_of_one(anchors, rows, i, j, good, D, BP, BK)
        low = tl.minimum(low, tl.min(tl.where(good, s, INF), 0))
        high = tl.maximum(high, tl.max(tl.where(good, s, -INF), 0))
        tl.store(listed + i * cap + k, s, mask=good)
        tl.store(beaten + i * cap + k, tl.zeros((BP,), tl.int32), mask=good)
    tl.store(totals + i, many)
    tl.store(lowest + i, low)
    tl.store(highest + i, high)
