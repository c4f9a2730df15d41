# mypy: disable-error-code="no-untyped-def"
"""What a memory does on a GPU: writing a batch to a queue or to the slots of its ids, moving rows along their gradient, and
looking up the newest copy of an image.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.checks import tolerance
from xbm.engine.triton.plan import MAX_ANCHORS, TABLE_SIZE
from xbm.engine.triton.positives import label_table, table_entry
from xbm.engine.triton.primitives import SIZES, wait_for_previous
from xbm.kernels import Kernel, is_aligned, kernel_key, on_device_of

# What happened to a row of a keyed enqueue. 0: it was masked, or a later row with the same id was written.
UNSOUND, REPLACED, NEW = (tl.constexpr(x) for x in (1, 2, 3))


@triton.jit
def check_rows(
    embeddings, ids, mask, offs_m, m, tolerance,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M,) twice: rows to write, and rows that are not finite, not of unit length or have a negative id."""
    selected = offs_m < m
    if HAS_MASK:
        selected = selected & (tl.load(mask + offs_m, mask=selected, other=0) != 0)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ptrs = embeddings + offs_m.to(tl.int64)[:, None] * D + offs_k[None, :]
        x = tl.load(ptrs, mask=selected[:, None] & (offs_k < D)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    sound = selected & (tl.abs(tl.sqrt(squares) - 1.0) <= tolerance)
    if HAS_IDS:
        sound = sound & (tl.load(ids + offs_m, mask=selected, other=-1) >= 0)
    return sound, selected & (sound == 0)


@triton.jit(do_not_specialize=["m", "size"])
def enqueue_kernel(
    embeddings, labels, ids, mask,
    rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound,  # the memory's buffers, updated in place
    m, size, tolerance,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    LARGER: tl.constexpr,  # whether the batch has more rows than the memory: only the last `size` sound ones stay
):  # fmt: skip
    """A single program writes all rows, block by block: the slot of a row depends on how many rows before it are sound, and
    the counters must not move before they have been read. A batch is small; this takes microseconds.
    """
    wait_for_previous()
    first = tl.load(pointer)
    now = tl.load(clock) + 1
    total = tl.load(count) * 0  # sound rows: an int64 zero
    if LARGER:
        for start in range(0, m, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            sound, _ = check_rows(embeddings, ids, mask, offs_m, m, tolerance, D, BLOCK_M, BLOCK_K, HAS_IDS, HAS_MASK)
            total += tl.sum(sound.to(tl.int64), 0)
    num_unsound = total * 0
    seen = total * 0
    for start in range(0, m, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        sound, bad = check_rows(embeddings, ids, mask, offs_m, m, tolerance, D, BLOCK_M, BLOCK_K, HAS_IDS, HAS_MASK)
        index = seen + tl.cumsum(sound.to(tl.int64), 0) - 1
        seen += tl.sum(sound.to(tl.int64), 0)
        num_unsound += tl.sum(bad.to(tl.int64), 0)
        if LARGER:
            sound = sound & (index >= total - size)
        slot = (first + tl.maximum(index, 0)) % size
        tl.store(row_labels + slot, tl.load(labels + offs_m, mask=sound, other=0), mask=sound)
        if HAS_IDS:
            tl.store(row_ids + slot, tl.load(ids + offs_m, mask=sound, other=-1), mask=sound)
        else:
            tl.store(row_ids + slot, tl.full((BLOCK_M,), -1, tl.int64), mask=sound)
        tl.store(stamps + slot, now + tl.zeros((BLOCK_M,), tl.int64), mask=sound)
        for column in range(0, D, BLOCK_K):
            offs_k = column + tl.arange(0, BLOCK_K)
            mask_x = sound[:, None] & (offs_k < D)[None, :]
            x = tl.load(embeddings + offs_m.to(tl.int64)[:, None] * D + offs_k[None, :], mask=mask_x, other=0.0)
            tl.store(rows + slot[:, None] * D + offs_k[None, :], x.to(rows.dtype.element_ty), mask=mask_x)
    tl.debug_barrier()
    if seen > 0:
        tl.store(pointer, (first + seen) % size)
        tl.store(count, tl.minimum(tl.load(count) + seen, size))
        tl.store(clock, now)
        tl.store(latest, seen)
    tl.store(unsound, tl.load(unsound) + num_unsound)


@triton.jit
def mixed_row(
    embeddings, rows, row, slot, exists, momentum, start, D: tl.constexpr, BLOCK_K: tl.constexpr, HAS_MOMENTUM: tl.constexpr
):
    """(BLOCK_K,): columns of momentum·old + (1 − momentum)·new, or of the new row if the slot was empty."""
    offs_k = start + tl.arange(0, BLOCK_K)
    x = tl.load(embeddings + row.to(tl.int64) * D + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
    if HAS_MOMENTUM:
        old = tl.load(rows + slot * D + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
        x = tl.where(exists, momentum * old + (1.0 - momentum) * x, x)
    return x


@triton.jit(do_not_specialize=["m", "size"])
def assign_kernel(
    embeddings, labels, ids, mask,
    rows, row_labels, row_ids, stamps, clock,  # the memory's buffers; all but the clock are updated in place
    outcomes,  # out, (m,)
    m, size, tolerance, momentum,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_MASK: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
):  # fmt: skip
    """v ← normalize(mixed row), one program per row. Of rows with the same id, the last sound one is written."""
    wait_for_previous()
    row = tl.program_id(0)
    slot = tl.load(ids + row)
    unit, bad = check_rows(embeddings, ids, mask, row + tl.arange(0, 1), m, tolerance, D, 1, BLOCK_K, True, HAS_MASK)
    selected = tl.max((unit | bad).to(tl.int32), 0) > 0
    sound = (tl.max(unit.to(tl.int32), 0) > 0) & (slot < size)
    writes = sound
    if sound:
        for start in range((row // BLOCK_M) * BLOCK_M, m, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            later = (offs_m > row) & (tl.load(ids + offs_m, mask=offs_m < m, other=-1) == slot)
            if tl.max(later.to(tl.int32), 0) > 0:
                later_sound, _ = check_rows(embeddings, ids, mask, offs_m, m, tolerance, D, BLOCK_M, BLOCK_K, True, HAS_MASK)
                writes = writes & (tl.max((later & later_sound).to(tl.int32), 0) == 0)
    outcome = tl.where(selected & (sound == 0), UNSOUND, 0)
    if writes:
        exists = tl.load(stamps + slot) >= 0
        outcome = tl.where(exists, REPLACED, NEW)
        squares = 0.0
        for start in range(0, D, BLOCK_K):
            x = mixed_row(embeddings, rows, row, slot, exists, momentum, start, D, BLOCK_K, HAS_MOMENTUM)
            squares += tl.sum(x * x, 0)
        norm = tl.where(exists & HAS_MOMENTUM, tl.maximum(tl.sqrt(squares), 1e-12), 1.0)
        for start in range(0, D, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            x = mixed_row(embeddings, rows, row, slot, exists, momentum, start, D, BLOCK_K, HAS_MOMENTUM) / norm
            tl.store(rows + slot * D + offs_k, x.to(rows.dtype.element_ty), mask=offs_k < D)
        tl.store(row_labels + slot, tl.load(labels + row))
        tl.store(row_ids + slot, slot)
        tl.store(stamps + slot, tl.load(clock) + 1)
    tl.store(outcomes + row, outcome)


@triton.jit(do_not_specialize=["m"])
def update_counters_kernel(outcomes, count, clock, unsound, m, BLOCK_M: tl.constexpr):
    """A kernel of its own, because the clock must not move before every program of `assign_kernel` has read it."""
    wait_for_previous()
    num_new = tl.load(count) * 0  # an int64 zero
    num_unsound = num_new
    num_written = num_new
    for start in range(0, m, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        outcome = tl.load(outcomes + offs_m, mask=offs_m < m, other=0)
        num_new += tl.sum((outcome == NEW).to(tl.int64), 0)
        num_unsound += tl.sum((outcome == UNSOUND).to(tl.int64), 0)
        num_written += tl.sum((outcome >= REPLACED).to(tl.int64), 0)
    tl.store(count, tl.load(count) + num_new)
    tl.store(clock, tl.load(clock) + (num_written > 0).to(tl.int64))
    tl.store(unsound, tl.load(unsound) + num_unsound)


@triton.jit
def moved_row(rows, gradient, row, alpha, offs_k, D: tl.constexpr):
    """v − α ∂L/∂v and ∂L/∂v, some columns of a row."""
    g = tl.load(gradient + row * D + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
    return tl.load(rows + row * D + offs_k, mask=offs_k < D, other=0.0).to(tl.float32) - alpha * g, g


@triton.jit
def descend_kernel(rows, gradient, alpha, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """v ← normalize(v − α ∂L/∂v), one program per row. A row without a gradient keeps its bits."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    squares = 0.0
    has_gradient = 0.0
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x, g = moved_row(rows, gradient, row, alpha, offs_k, D)
        squares += tl.sum(x * x, 0)
        has_gradient = tl.maximum(has_gradient, tl.max((g != 0).to(tl.float32), 0))
    if has_gradient > 0:
        norm = tl.maximum(tl.sqrt(squares), 1e-12)
        for start in range(0, D, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            x, _ = moved_row(rows, gradient, row, alpha, offs_k, D)
            tl.store(rows + row * D + offs_k, (x / norm).to(rows.dtype.element_ty), mask=offs_k < D)


@triton.jit(do_not_specialize=SIZES)
def newest_kernel(
    ids, row_ids, stamps, pointer, table,
    newest,  # (m,), zeros, updated in place: 1 for the oldest row of the queue, M for the newest
    m, M, TABLE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Looks up the id of every row in a table of the anchors' ids, and keeps the most recent row of each id."""
    wait_for_previous()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < M
    row_id = tl.load(row_ids + offs_n, mask=mask_n, other=-1)
    owner = tl.load(table + table_entry(row_id, TABLE_SIZE), mask=mask_n, other=0).to(tl.int32)
    same = (owner > 0) & (tl.load(ids + tl.maximum(owner - 1, 0), mask=owner > 0, other=0) == row_id)
    several = mask_n & (owner < 0)
    if tl.max((same | several).to(tl.int32), 0) > 0:
        written = tl.load(stamps + offs_n, mask=mask_n, other=-1) >= 0
        oldest = tl.load(pointer).to(tl.int32)  # the slot before it was written last
        recency = 1 + tl.where(offs_n >= oldest, offs_n - oldest, offs_n - oldest + M)
        # integers: their maximum is the same in any order
        tl.atomic_max(newest + tl.maximum(owner - 1, 0), recency, mask=same & written, sem="relaxed")
        if tl.max(several.to(tl.int32), 0) > 0:
            for anchor in range(0, m):
                mask = several & written & (row_id == tl.load(ids + anchor))
                tl.atomic_max(newest + anchor + tl.zeros((BLOCK_N,), tl.int32), recency, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def newest_slots_kernel(
    ids, pointer, table, newest,
    slots,  # out, (m,)
    m, M, TABLE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < m
    entry = table_entry(tl.load(ids + offs_m, mask=mask_m, other=0), TABLE_SIZE)
    owner = tl.load(table + entry, mask=mask_m, other=0).to(tl.int32)
    recency = tl.load(newest + tl.where(owner > 0, owner - 1, offs_m), mask=mask_m, other=0)
    slot = recency - 1 + tl.load(pointer).to(tl.int32)
    slot = tl.where(slot >= M, slot - M, slot)
    tl.store(slots + offs_m, tl.where(recency > 0, slot, -1).to(tl.int64), mask=mask_m)


_enqueue, _assign, _update_counters, _descend, _newest, _newest_slots = (
    Kernel(jitted, overlap=True)
    for jitted in (
        enqueue_kernel, assign_kernel, update_counters_kernel, descend_kernel, newest_kernel, newest_slots_kernel,
    )
)  # fmt: skip


@torch.library.custom_op(
    "xbm::triton_enqueue",
    mutates_args=("rows", "row_labels", "row_ids", "stamps", "pointer", "count", "clock", "latest", "unsound"),
)
def enqueue_op(
    embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None,
    rows: Tensor, row_labels: Tensor, row_ids: Tensor, stamps: Tensor,
    pointer: Tensor, count: Tensor, clock: Tensor, latest: Tensor, unsound: Tensor,
) -> None:  # fmt: skip
    """The enqueue as one graph node, for torch.compile."""
    _write(embeddings, labels, ids, mask, rows, row_labels, row_ids, stamps, pointer, count, clock, latest, unsound)


@enqueue_op.register_fake
def _(*buffers):
    return None


@on_device_of(4)
def _write(embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None, rows: Tensor, *buffers: Tensor) -> None:
    (m, D), size = embeddings.shape, rows.shape[0]
    batch = [x if x is None else x.contiguous() for x in (embeddings, labels, ids, mask)]
    key = None
    if is_aligned(*batch, rows, *buffers):
        key = kernel_key(rows.device, m, size, D, embeddings.dtype, rows.dtype, ids is not None, mask is not None)
    _enqueue(
        key, (1, 1, 1), 16, 1, *batch, rows, *buffers, m, size, tolerance(embeddings.dtype),
        D, 32, 256, ids is not None, mask is not None, m > size,
    )  # fmt: skip


def enqueue(embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None, *buffers: Tensor) -> None:
    """Writes the sound rows of a batch to the next slots of a queue, and counts the unsound ones.

    Args:
        buffers: those of the memory, in the order of `enqueue_op`.
    """
    if torch.compiler.is_compiling():
        enqueue_op(embeddings, labels, ids, mask, *buffers)
    else:
        _write(embeddings, labels, ids, mask, *buffers)
        torch.autograd.graph.increment_version(buffers)  # otherwise autograd would not notice that saved tensors have changed


@on_device_of(4)
def assign(
    embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None,
    rows: Tensor, row_labels: Tensor, row_ids: Tensor, stamps: Tensor, count: Tensor, clock: Tensor, unsound: Tensor,
    momentum: float,
) -> None:  # fmt: skip
    """Writes the sound rows of a batch to the slots of their ids, mixed with what is stored there."""
    (m, D), size = embeddings.shape, rows.shape[0]
    outcomes = torch.empty(m, dtype=torch.int32, device=rows.device)
    batch = [x if x is None else x.contiguous() for x in (embeddings, labels, ids, mask)]
    buffers = (rows, row_labels, row_ids, stamps, clock, count, unsound)
    key = None
    if is_aligned(*batch, *buffers):
        key = kernel_key("assign", rows.device, D, embeddings.dtype, rows.dtype, mask is not None, momentum)
    _assign(
        key, (m, 1, 1), 4, 1, *batch, rows, row_labels, row_ids, stamps, clock, outcomes, m, size, tolerance(embeddings.dtype),
        momentum, D, 32, 256, mask is not None, momentum > 0,
    )  # fmt: skip
    _update_counters(key, (1, 1, 1), 4, 1, outcomes, count, clock, unsound, m, 1024)
    torch.autograd.graph.increment_version(buffers)


@on_device_of(0)
def descend(rows: Tensor, gradient: Tensor, alpha: float) -> None:
    """v ← normalize(v − α ∂L/∂v) for every row that has a gradient."""
    (M, D), gradient = rows.shape, gradient.contiguous()
    key = None
    if is_aligned(rows, gradient):
        key = kernel_key("descend", rows.device, D, rows.dtype, gradient.dtype, alpha)
    _descend(key, (M, 1, 1), 4, 1, rows, gradient, alpha, D, 512)
    torch.autograd.graph.increment_version((rows,))


@on_device_of(0)
def newest_copies(ids: Tensor, row_ids: Tensor, stamps: Tensor, pointer: Tensor) -> Tensor:
    """(m,): the slot that a queue wrote last among those with each id, -1 if there is none."""
    ids, m, M = ids.contiguous(), ids.shape[0], row_ids.shape[0]
    slots = torch.empty_like(ids)
    if m == 0:
        return slots
    if m > MAX_ANCHORS:
        return torch.cat([newest_copies(some, row_ids, stamps, pointer) for some in ids.split(MAX_ANCHORS)])
    key = kernel_key("copies", ids.device) if is_aligned(ids) else None
    table, newest = label_table(key, ids, 1)
    sizes = (m, M, TABLE_SIZE)
    _newest(key, (-(-M // 1024), 1, 1), 4, 1, ids, row_ids, stamps, pointer, table, newest, *sizes, 1024)
    _newest_slots(key, (-(-m // 256), 1, 1), 4, 1, ids, pointer, table, newest, slots, *sizes, 256)
    return slots
