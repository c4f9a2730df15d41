# mypy: disable-error-code="no-untyped-def"
"""The positives first: two kernels that count and list the rows that share an anchor's label.

Positives are few, so they are found by scanning the labels (8 bytes a row) and only tiles that hold one are multiplied.
Counting before listing gives each program its place in an anchor's list: no atomics, the same order every time.
A list holds cap entries. Of an anchor with more, the count and the smallest similarity are still exact, and the kernels that
read the list find the anchor's positives by scanning again.
"""

import triton
import triton.language as tl

from xbm.engine.triton.tiles import INF, SIZES, halves, may_meet, own_slots, similarities, total


@triton.jit
def may_share(row_labels, start, last, low, BN: tl.constexpr):
    """Whether any of BN rows may share a label with an anchor, by the lower halves of the labels."""
    j = start + tl.arange(0, BN)
    row_low = tl.load(halves(row_labels) + 2 * j.to(tl.int64), mask=j < last, other=0)
    return tl.max(tl.max((row_low[None, :] == low[:, None]).to(tl.int32), 1), 0) > 0


@triton.jit(do_not_specialize=SIZES)
def count(
    row_labels, stamps, row_ids, labels, ids, own, pointer,  # who meets whom
    counts,  # out: (m, scans), positives that each program found
    m, M, per, scans,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
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
        if may_share(row_labels, start, last, label.to(tl.int32), BN):
            for part in range(0, BN, SUB):
                j = start + part + tl.arange(0, SUB)
                here = j < last
                good = (tl.load(row_labels + j, mask=here, other=0)[None, :] == label[:, None]) & here[None, :]
                good = good & may_meet(j, here, stamps, row_ids, anchor_ids, slots, BY_ID, BY_SLOT)
                found += tl.sum(good.to(tl.int32), 1)
    tl.store(counts + i * scans + scan, found, mask=i < m)


@triton.jit(do_not_specialize=SIZES)
def enlist(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    counts,
    lowest, highest,  # out: (m, scans), the extreme similarities
    listed, places, beaten,  # out: (m, cap), similarities, rows, and zeros to count in
    m, M, per, scans, cap,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    known = tl.minimum(i, m - 1)
    scan = tl.program_id(1)
    label = tl.load(labels + known)
    anchor_ids = tl.load(ids + known) if BY_ID else label
    slots = own_slots(own, pointer, known, m, M, BY_SLOT)
    first = scan * per
    last = tl.minimum(first + per, M)
    place = total(counts, known, scans, scan, BM, 128)  # (BM,), where this program's part of each list starts
    low = tl.full((BM,), INF, tl.float32)
    high = tl.full((BM,), -INF, tl.float32)
    for start in range(first, last, BN):
        if may_share(row_labels, start, last, label.to(tl.int32), BN):
            for part in range(0, BN, SUB):
                j = start + part + tl.arange(0, SUB)
                here = j < last
                good = (tl.load(row_labels + j, mask=here, other=0)[None, :] == label[:, None]) & here[None, :]
                good = good & may_meet(j, here, stamps, row_ids, anchor_ids, slots, BY_ID, BY_SLOT) & (i < m)[:, None]
                if tl.max(tl.max(good.to(tl.int32), 1), 0) > 0:
                    S = similarities(anchors, rows, known, j, i < m, here, D, BM, SUB, BK, PRECISION)
                    low = tl.minimum(low, tl.min(tl.where(good, S, INF), 1))
                    high = tl.maximum(high, tl.max(tl.where(good, S, -INF), 1))
                    at = place[:, None] + tl.cumsum(good.to(tl.int32), 1) - 1
                    fits = good & (at < cap)
                    at = known[:, None] * cap + at
                    tl.store(listed + at, S, mask=fits)
                    tl.store(places + at, tl.broadcast_to(j[None, :], (BM, SUB)), mask=fits)
                    tl.store(beaten + at, tl.zeros((BM, SUB), tl.int32), mask=fits)
                    place += tl.sum(good.to(tl.int32), 1)
    tl.store(lowest + i * scans + scan, low, mask=i < m)
    tl.store(highest + i * scans + scan, high, mask=i < m)
