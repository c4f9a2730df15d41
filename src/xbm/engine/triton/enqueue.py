# mypy: disable-error-code="no-untyped-def"
"""The queue's enqueue as one kernel: checks, rows, labels, ids, stamps, pointer and counters.

One program does it all, block after block of rows: where a row goes depends on how many before it were sound, and
the counters must not move before everybody has read them. A batch is small, the kernel is done in microseconds.
"""

import triton
import triton.language as tl

from xbm.kernels.launch import await_others


@triton.jit
def sound_rows(
    embeddings, ids, mask, k, m, tolerance,
    D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """(BN,) twice: rows to take, and rows that are asked for but not finite, not of unit length or without a proper id."""
    asked = k < m
    if HAS_MASK:
        asked = asked & (tl.load(mask + k, mask=asked, other=0) != 0)
    square = tl.zeros((BN,), tl.float32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        of = embeddings + k.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(of, mask=asked[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        square += tl.sum(x * x, 1)
    sound = asked & (tl.abs(tl.sqrt(square) - 1.0) <= tolerance)
    if HAS_IDS:
        sound = sound & (tl.load(ids + k, mask=asked, other=-1) >= 0)
    return sound, asked & (sound == 0)


@triton.jit(do_not_specialize=["m", "size"])
def enqueue(
    embeddings, labels, ids, mask,
    rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound,  # the memory's buffers, changed in place
    m, size, tolerance,
    D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    await_others()
    first = tl.load(pointer)
    now = tl.load(clock) + 1
    many = tl.load(count) * 0  # how many rows are sound: int64 zero
    if TWICE:  # more rows than the memory holds: only the last `size` sound ones stay, so count them beforehand
        for start in range(0, m, BN):
            k = start + tl.arange(0, BN)
            sound, _ = sound_rows(embeddings, ids, mask, k, m, tolerance, D, BN, BK, HAS_IDS, HAS_MASK)
            many += tl.sum(sound.to(tl.int64), 0)
    bad = many * 0
    seen = many * 0
    for start in range(0, m, BN):
        k = start + tl.arange(0, BN)
        sound, left_out = sound_rows(embeddings, ids, mask, k, m, tolerance, D, BN, BK, HAS_IDS, HAS_MASK)
        place = seen + tl.cumsum(sound.to(tl.int64), 0) - 1
        seen += tl.sum(sound.to(tl.int64), 0)
        bad += tl.sum(left_out.to(tl.int64), 0)
        if TWICE:
            sound = sound & (place >= many - size)
        slot = (first + tl.maximum(place, 0)) % size
        tl.store(row_labels + slot, tl.load(labels + k, mask=sound, other=0), mask=sound)
        if HAS_IDS:
            tl.store(row_ids + slot, tl.load(ids + k, mask=sound, other=-1), mask=sound)
        else:
            tl.store(row_ids + slot, tl.full((BN,), -1, tl.int64), mask=sound)
        tl.store(stamps + slot, now + tl.zeros((BN,), tl.int64), mask=sound)
        for column in range(0, D, BK):
            d = column + tl.arange(0, BK)
            which = sound[:, None] & (d < D)[None, :]
            x = tl.load(embeddings + k.to(tl.int64)[:, None] * D + d[None, :], mask=which, other=0.0)
            tl.store(rows + slot[:, None] * D + d[None, :], x.to(rows.dtype.element_ty), mask=which)
    tl.debug_barrier()
    if seen > 0:
        tl.store(pointer, (first + seen) % size)
        tl.store(count, tl.minimum(tl.load(count) + seen, size))
        tl.store(clock, now)
        tl.store(latest, seen)
    tl.store(unsound, tl.load(unsound) + bad)
