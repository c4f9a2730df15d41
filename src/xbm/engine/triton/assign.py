# mypy: disable-error-code="no-untyped-def"
"""What keyed memories do, slot = instance id: the enqueue as two kernels, and the descent of the rows as one.

One program a row mixes and writes it, then one counts what was done: the clock must not move before everybody has read it.
"""

import triton
import triton.language as tl

from xbm.engine.triton.enqueue import sound_rows
from xbm.kernels.launch import await_others

LEFT_OUT, WRITTEN, NEW = (tl.constexpr(k) for k in (1, 2, 3))  # what became of a row; 0: not asked for, or a later one won


@triton.jit
def mixed(embeddings, rows, i, slot, there, momentum, start, D: tl.constexpr, BK: tl.constexpr, MIXES: tl.constexpr):
    """(BK,): a part of momentum·v + (1 − momentum)·new, or of `new` itself where nothing was."""
    d = start + tl.arange(0, BK)
    x = tl.load(embeddings + i.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    if MIXES:
        old = tl.load(rows + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = tl.where(there, momentum * old + (1.0 - momentum) * x, x)
    return x


@triton.jit(do_not_specialize=["m", "size"])
def assign(
    embeddings, labels, ids, mask,
    rows, row_labels, row_ids, stamps, clock,  # the memory's buffers; all but the clock are changed in place
    became,  # out, (m,)
    m, size, tolerance, momentum,
    D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_MASK: tl.constexpr, MIXES: tl.constexpr,
):  # fmt: skip
    """v ← normalise(mixed). Of rows with the same id the last sound one wins."""
    await_others()
    i = tl.program_id(0)
    slot = tl.load(ids + i)
    unit, bad = sound_rows(embeddings, ids, mask, i + tl.arange(0, 1), m, tolerance, D, 1, BK, True, HAS_MASK)
    asked = tl.max((unit | bad).to(tl.int32), 0) > 0
    sound = (tl.max(unit.to(tl.int32), 0) > 0) & (slot < size)
    wins = sound
    if sound:
        for start in range((i // BN) * BN, m, BN):
            k = start + tl.arange(0, BN)
            rival = (k > i) & (tl.load(ids + k, mask=k < m, other=-1) == slot)
            if tl.max(rival.to(tl.int32), 0) > 0:
                also, _ = sound_rows(embeddings, ids, mask, k, m, tolerance, D, BN, BK, True, HAS_MASK)
                wins = wins & (tl.max((rival & also).to(tl.int32), 0) == 0)
    outcome = tl.where(asked & (sound == 0), LEFT_OUT, 0)
    if wins:
        there = tl.load(stamps + slot) >= 0
        outcome = tl.where(there, WRITTEN, NEW)
        square = 0.0
        for start in range(0, D, BK):
            x = mixed(embeddings, rows, i, slot, there, momentum, start, D, BK, MIXES)
            square += tl.sum(x * x, 0)
        length = tl.where(there & MIXES, tl.maximum(tl.sqrt(square), 1e-12), 1.0)
        for start in range(0, D, BK):
            d = start + tl.arange(0, BK)
            x = mixed(embeddings, rows, i, slot, there, momentum, start, D, BK, MIXES) / length
            tl.store(rows + slot * D + d, x.to(rows.dtype.element_ty), mask=d < D)
        tl.store(row_labels + slot, tl.load(labels + i))
        tl.store(row_ids + slot, slot)
        tl.store(stamps + slot, tl.load(clock) + 1)
    tl.store(became + i, outcome)


@triton.jit(do_not_specialize=["m"])
def tally(became, count, clock, unsound, m, BN: tl.constexpr):
    """The counters, from what became of the rows."""
    await_others()
    new = tl.load(count) * 0  # int64 zero
    left_out = new
    written = new
    for start in range(0, m, BN):
        k = start + tl.arange(0, BN)
        outcome = tl.load(became + k, mask=k < m, other=0)
        new += tl.sum((outcome == NEW).to(tl.int64), 0)
        left_out += tl.sum((outcome == LEFT_OUT).to(tl.int64), 0)
        written += tl.sum((outcome >= WRITTEN).to(tl.int64), 0)
    tl.store(count, tl.load(count) + new)
    tl.store(clock, tl.load(clock) + (written > 0).to(tl.int64))
    tl.store(unsound, tl.load(unsound) + left_out)


@triton.jit
def moved(rows, gradient, row, alpha, d, D: tl.constexpr):
    """v − α ∂L/∂v and ∂L/∂v at the places d of a row."""
    g = tl.load(gradient + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.load(rows + row * D + d, mask=d < D, other=0.0).to(tl.float32) - alpha * g, g


@triton.jit
def descend(rows, gradient, alpha, D: tl.constexpr, BK: tl.constexpr):
    """v ← normalise(v − α ∂L/∂v), a program a row; a row without gradient keeps its bits."""
    await_others()
    row = tl.program_id(0).to(tl.int64)
    square = 0.0
    most = 0.0
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        x, g = moved(rows, gradient, row, alpha, d, D)
        square += tl.sum(x * x, 0)
        most = tl.maximum(most, tl.max((g != 0).to(tl.float32), 0))
    if most > 0:
        length = tl.maximum(tl.sqrt(square), 1e-12)
        for start in range(0, D, BK):
            d = start + tl.arange(0, BK)
            x, _ = moved(rows, gradient, row, alpha, d, D)
            tl.store(rows + row * D + d, (x / length).to(rows.dtype.element_ty), mask=d < D)
