# mypy: disable-error-code="no-untyped-def"
"""Lists the positives of every anchor before the pass over the bank.

Positives are few, so they are found by their labels (8 bytes a row). `label_table_kernel` enters the anchors into a small hash
table by label. `count_kernel` looks up the label of every row there and counts, for each part of the bank, the rows that share
it. `list_kernel`, one program per anchor, scans the parts that contain some. Counting needs no order, and listing always gives
the same one. Anchors of one label share its counts; if two labels fall on the same entry of the table, their rows are compared
with every anchor.

A list holds `capacity` entries. If an anchor has more positives, their number and extreme similarities are still exact, and
the kernels that read the list scan the bank again for this anchor: `finish_kernel`, and for the triplet loss
`overflow_kernel`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.engine.triton.plan import TABLE_SIZE, Case, Settings
from xbm.engine.triton.primitives import (
    INF,
    NUM_OVERFLOW,
    OVERFLOW_NEGATIVES,
    OVERFLOW_POSITIVES,
    OVERFLOW_TRIPLETS,
    OVERFLOW_VALUE,
    SIZES,
    anchor_similarities,
    candidate_mask,
    positive_mask,
    self_slots,
    wait_for_previous,
)
from xbm.kernels import Kernel

# Entries of the table: no anchor, the index of an anchor plus one, or several labels.
FREE = tl.constexpr(0)
SEVERAL = tl.constexpr(-1)


class Positives(NamedTuple):
    """The positives of each anchor, in the order of the rows; `Positives()` if they are not listed."""

    counts: Tensor | None = None  # (m,)
    lowest: Tensor | None = None  # (m,), the smallest similarity, inf if there is none
    highest: Tensor | None = None  # (m,)
    similarities: Tensor | None = None  # (m, capacity)
    rows: Tensor | None = None  # (m, capacity)
    violations: Tensor | None = None  # (m, capacity), triplet: the negatives within the margin of each positive


@triton.jit
def table_entry(label, TABLE_SIZE: tl.constexpr):
    mixed = (label ^ (label >> 32)).to(tl.int32) * -1640531527  # 2³² / golden ratio: neighbors end up far apart
    return (mixed >> 12) & (TABLE_SIZE - 1)


@triton.jit(do_not_specialize=SIZES)
def label_table_kernel(
    labels,
    table,  # out: (TABLE_SIZE,)
    counts,  # out: (m, num_parts), zeros
    m, num_parts, TABLE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program 0 fills the table, the others clear the counts."""
    wait_for_previous()
    pid = tl.program_id(0)
    if pid > 0:
        offs = (pid - 1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        tl.store(counts + offs, tl.zeros((BLOCK_T,), tl.int32), mask=offs < m.to(tl.int64) * num_parts)
    else:
        for start in range(0, TABLE_SIZE, BLOCK_T):
            tl.store(table + start + tl.arange(0, BLOCK_T), tl.full((BLOCK_T,), FREE, tl.int16))
        tl.debug_barrier()
        for start in range(0, m, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            entry = table_entry(tl.load(labels + offs_m, mask=offs_m < m, other=0), TABLE_SIZE)
            tl.store(table + entry, (offs_m + 1).to(tl.int16), mask=offs_m < m)
        tl.debug_barrier()
        for start in range(0, m, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            label = tl.load(labels + offs_m, mask=offs_m < m, other=0)
            entry = table_entry(label, TABLE_SIZE)
            owner = tl.load(table + entry, mask=offs_m < m, other=0).to(tl.int32)
            owner_label = tl.load(labels + tl.maximum(owner - 1, 0), mask=offs_m < m, other=0)
            mask_several = (offs_m < m) & (owner_label != label)
            tl.store(table + entry, tl.full((BLOCK_M,), SEVERAL, tl.int16), mask=mask_several)


@triton.jit(do_not_specialize=SIZES)
def count_kernel(
    row_labels, labels, table,
    counts,  # (m, num_parts), updated in place
    m, M, rows_per_part, num_parts, TABLE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Counts the rows of each part that share a label, under one of the anchors with this label."""
    wait_for_previous()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < M
    row_label = tl.load(row_labels + offs_n, mask=mask_n, other=0)
    owner = tl.load(table + table_entry(row_label, TABLE_SIZE), mask=mask_n, other=0).to(tl.int32)
    same = (owner > 0) & (tl.load(labels + tl.maximum(owner - 1, 0), mask=owner > 0, other=0) == row_label) & mask_n
    one = tl.full((BLOCK_N,), 1, tl.int32)
    part = offs_n // rows_per_part
    tl.atomic_add(counts + tl.maximum(owner - 1, 0).to(tl.int64) * num_parts + part, one, mask=same, sem="relaxed")
    several = mask_n & (owner < 0)
    if tl.max(several.to(tl.int32), 0) > 0:
        for anchor in range(0, m):
            mask = several & (row_label == tl.load(labels + anchor))
            tl.atomic_add(counts + anchor * num_parts + part, one, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def list_kernel(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    table, part_counts,
    pos_counts, lowest, highest, pos_sims, pos_rows, violations,  # out, see Positives; violations: zeros
    m, M, rows_per_part, num_parts, group, capacity,
    EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, D: tl.constexpr, TABLE_SIZE: tl.constexpr,
    PARTS_PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # whether `group` parts are one block of rows, so that every block has a row of the label
):  # fmt: skip
    wait_for_previous()
    anchor = tl.program_id(0)
    offs_m = anchor + tl.arange(0, 1)
    label = tl.load(labels + anchor)
    slot = self_slots(own, pointer, offs_m, m, M, EXCLUDE_SLOT)
    anchor_id = tl.load(ids + offs_m) if EXCLUDE_ID else slot
    owner = tl.load(table + table_entry(label, TABLE_SIZE)).to(tl.int32)
    owner = tl.where(owner > 0, owner - 1, anchor)
    offs_part = tl.arange(0, PARTS_PADDED)
    counts = tl.load(part_counts + owner.to(tl.int64) * num_parts + offs_part, mask=offs_part < num_parts, other=0)
    upper_bound = tl.sum(counts, 0)  # it includes the anchor itself and rows that were not written
    seen = 0
    low = INF
    high = -INF
    part = tl.min(tl.where(counts > 0, offs_part, PARTS_PADDED), 0)
    while part < PARTS_PADDED:
        stop = tl.minimum((part + group) * rows_per_part, M)
        for start in range(part * rows_per_part, stop, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            positive = positive_mask(
                offs_n, offs_n < stop, row_labels, stamps, row_ids, label, anchor_id, slot, EXCLUDE_ID, EXCLUDE_SLOT, ONE_BLOCK
            )
            num_positives = tl.sum(positive.to(tl.int32), 0)
            if num_positives > 0:
                index = seen + tl.cumsum(positive.to(tl.int32), 0) - 1
                tl.store(pos_rows + anchor * capacity + index, offs_n, mask=positive & (index < capacity))
                seen += num_positives
                if upper_bound > capacity:  # the list may not hold all of them
                    for block in range(0, BLOCK_N, BLOCK_P):
                        offs_p = start + block + tl.arange(0, BLOCK_P)
                        mask_p = positive_mask(
                            offs_p, offs_p < stop, row_labels, stamps, row_ids, label, anchor_id, slot,
                            EXCLUDE_ID, EXCLUDE_SLOT, True,
                        )  # fmt: skip
                        if tl.max(mask_p.to(tl.int32), 0) > 0:
                            sims = anchor_similarities(anchors, rows, anchor, offs_p, mask_p, D, BLOCK_P, BLOCK_K)
                            low = tl.minimum(low, tl.min(tl.where(mask_p, sims, INF), 0))
                            high = tl.maximum(high, tl.max(tl.where(mask_p, sims, -INF), 0))
        part = tl.min(tl.where((counts > 0) & (offs_part >= part + group), offs_part, PARTS_PADDED), 0)
    tl.debug_barrier()
    for start in range(0, tl.minimum(seen, capacity), BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask_p = offs_p < tl.minimum(seen, capacity)
        offs_n = tl.load(pos_rows + anchor * capacity + offs_p, mask=mask_p, other=0)
        sims = anchor_similarities(anchors, rows, anchor, offs_n, mask_p, D, BLOCK_P, BLOCK_K)
        low = tl.minimum(low, tl.min(tl.where(mask_p, sims, INF), 0))
        high = tl.maximum(high, tl.max(tl.where(mask_p, sims, -INF), 0))
        tl.store(pos_sims + anchor * capacity + offs_p, sims, mask=mask_p)
        tl.store(violations + anchor * capacity + offs_p, tl.zeros((BLOCK_P,), tl.int32), mask=mask_p)
    tl.store(pos_counts + anchor, seen)
    tl.store(lowest + anchor, low)
    tl.store(highest + anchor, high)


@triton.jit
def add_rows(gradient, rows, anchor, offs_n, weights, mask_n, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """gradient[anchor] += Σ weight·row over the masked rows."""
    tl.debug_barrier()
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        row_ptrs = rows + offs_n.to(tl.int64)[:, None] * D + offs_k[None, :]
        v = tl.load(row_ptrs, mask=mask_n[:, None] & (offs_k < D)[None, :], other=0.0).to(tl.float32)
        grad_ptrs = gradient + anchor.to(tl.int64) * D + offs_k
        g = tl.load(grad_ptrs, mask=offs_k < D, other=0.0)
        tl.store(grad_ptrs, g + tl.sum(weights[:, None] * v, 0), mask=offs_k < D)
    tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def overflow_kernel(
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer,
    pos_counts, lowest, pos_sims, pos_rows, violations,
    overflow, overflow_gradient,  # out: (NUM_OVERFLOW, m), (m, D)
    m, M, capacity, margin,
    EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The triplet loss of an anchor with more positives than its list holds: exact, and slow.

    One program takes one such anchor (all others return at once) and processes its positives one list at a time: it lists
    them, compares every negative with them, and adds their gradients. What a negative's rank gains from one list does not
    depend on the others, so the sums are those of one long list.
    """
    wait_for_previous()
    anchor = tl.program_id(0)
    offs_m = anchor + tl.arange(0, 1)
    num_positives = tl.load(pos_counts + anchor)
    if num_positives > capacity:
        for start in range(0, D, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            grad_ptrs = overflow_gradient + anchor.to(tl.int64) * D + offs_k
            tl.store(grad_ptrs, tl.zeros((BLOCK_K,), tl.float32), mask=offs_k < D)
        slot = self_slots(own, pointer, offs_m, m, M, EXCLUDE_SLOT)
        anchor_id = tl.load(ids + offs_m) if EXCLUDE_ID else slot
        label = tl.load(labels + anchor)
        floor = tl.load(lowest + anchor) - margin
        value = 0.0
        triplets = 0.0
        negatives = 0.0
        positives = 0.0
        list_sims = pos_sims + anchor * capacity
        for done in range(0, num_positives, capacity):
            size = tl.minimum(num_positives - done, capacity)
            seen = -done
            tl.debug_barrier()
            for start in range(0, M, BLOCK_N):  # list the next positives
                offs_n = start + tl.arange(0, BLOCK_N)
                mask_n = positive_mask(
                    offs_n, offs_n < M, row_labels, stamps, row_ids, label, anchor_id, slot, EXCLUDE_ID, EXCLUDE_SLOT, False
                )
                if tl.max(mask_n.to(tl.int32), 0) > 0:
                    index = seen + tl.cumsum(mask_n.to(tl.int32), 0) - 1
                    seen += tl.sum(mask_n.to(tl.int32), 0)
                    mask_n = mask_n & (index >= 0) & (index < capacity)
                    if tl.max(mask_n.to(tl.int32), 0) > 0:
                        sims = anchor_similarities(anchors, rows, anchor, offs_n, mask_n, D, BLOCK_N, BLOCK_K)
                        tl.store(list_sims + index, sims, mask=mask_n)
                        tl.store(pos_rows + anchor * capacity + index, offs_n, mask=mask_n)
                        tl.store(violations + anchor * capacity + index, tl.zeros((BLOCK_N,), tl.int32), mask=mask_n)
            tl.debug_barrier()
            for start in range(0, M, BLOCK_N):  # compare every negative with them
                offs_n = start + tl.arange(0, BLOCK_N)
                in_bank = offs_n < M
                mask_n = in_bank & (tl.load(row_labels + offs_n, mask=in_bank, other=0) != label)
                candidates = candidate_mask(offs_n, in_bank, stamps, row_ids, anchor_id, slot, EXCLUDE_ID, EXCLUDE_SLOT)
                mask_n = mask_n & (tl.max(candidates.to(tl.int32), 0) > 0)
                sims = anchor_similarities(anchors, rows, anchor, offs_n, mask_n, D, BLOCK_N, BLOCK_K)
                mask_n = mask_n & (sims > floor)
                if tl.max(mask_n.to(tl.int32), 0) > 0:
                    rank = tl.zeros((BLOCK_N,), tl.float32)
                    for block in range(0, size, BLOCK_P):
                        offs_p = block + tl.arange(0, BLOCK_P)
                        threshold = tl.load(list_sims + offs_p, mask=offs_p < size, other=0.0) - margin
                        mask_pairs = mask_n[:, None] & (offs_p < size)[None, :]
                        excess = tl.where(mask_pairs, sims[:, None] - threshold[None, :], 0.0)
                        rank += tl.sum((excess > 0).to(tl.float32), 1)
                        value += tl.sum(tl.sum(tl.maximum(excess, 0.0), 1), 0)
                        hits = tl.sum((excess > 0).to(tl.int32), 0)
                        tl.atomic_add(violations + anchor * capacity + offs_p, hits, mask=offs_p < size, sem="relaxed")
                    triplets += tl.sum(rank, 0)
                    add_rows(overflow_gradient, rows, anchor, offs_n, rank, mask_n, D, BLOCK_K)
                if done == 0:
                    negatives += tl.sum(mask_n.to(tl.float32), 0)
            tl.debug_barrier()
            for start in range(0, size, BLOCK_N):  # add the gradients of the positives
                offs_p = start + tl.arange(0, BLOCK_N)
                mask_p = offs_p < size
                violation_ptrs = violations + anchor * capacity + offs_p
                weights = tl.load(violation_ptrs, mask=mask_p, other=0, cache_modifier=".cg").to(tl.float32)
                offs_n = tl.load(pos_rows + anchor * capacity + offs_p, mask=mask_p, other=0)
                positives += tl.sum((weights > 0).to(tl.float32), 0)
                add_rows(overflow_gradient, rows, anchor, offs_n, -weights, mask_p, D, BLOCK_K)
        tl.store(overflow + OVERFLOW_VALUE * m + anchor, value)
        tl.store(overflow + OVERFLOW_TRIPLETS * m + anchor, triplets)
        tl.store(overflow + OVERFLOW_NEGATIVES * m + anchor, negatives)
        tl.store(overflow + OVERFLOW_POSITIVES * m + anchor, positives)


_label_table, _count, _list, _overflow = (
    Kernel(jitted, overlap=True) for jitted in (label_table_kernel, count_kernel, list_kernel, overflow_kernel)
)


def label_table(key: int | None, labels: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """The hash table of labels (or ids), and zeros of shape (m, num_parts)."""
    m, device = labels.shape[0], labels.device
    table = torch.empty(TABLE_SIZE, dtype=torch.int16, device=device)
    counts = torch.empty((m, num_parts), dtype=torch.int32, device=device)
    grid = (1 - (-m * num_parts // 8192), 1, 1)  # triton.cdiv takes microseconds
    _label_table(key, grid, 16, 1, labels, table, counts, m, num_parts, TABLE_SIZE, 1024, 8192)
    return table, counts


def list_positives(case: Case, s: Settings, key: int | None, pairs: tuple) -> Positives:
    """Lists the positives of all anchors. `pairs`: anchors, rows and what tells positives from negatives."""
    m, M, p, device = case.m, case.M, s.plan, case.device
    row_labels, labels = pairs[2], pairs[5]
    table, part_counts = label_table(key, labels, p.num_parts)
    sizes = (m, M, p.rows_per_part, p.num_parts)
    _count(key, (p.lookups, 1, 1), 4, 1, row_labels, labels, table, part_counts, *sizes, TABLE_SIZE, 1024)
    counts, rows, violations = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((m,), (m, p.capacity), (m, p.capacity))
    )
    lowest, highest, similarities = (
        torch.empty(shape, dtype=torch.float32, device=device) for shape in ((m,), (m,), (m, p.capacity))
    )
    positives = Positives(counts, lowest, highest, similarities, rows, violations)
    _list(
        key, (m, 1, 1), 8, 2, *pairs, table, part_counts, *positives, *sizes, p.group, p.capacity,
        case.exclude_id, case.exclude_slot, case.D, TABLE_SIZE, p.parts_padded, 1024, 16, 128, p.rows_per_part <= 1024,
    )  # fmt: skip
    return positives


def overflow_triplets(case: Case, s: Settings, key: int | None, pairs: tuple, positives: Positives) -> tuple[Tensor, Tensor]:
    """The triplet loss and gradient of the anchors whose positives do not fit into their lists."""
    counts, lowest, _, similarities, rows, violations = positives
    sums = torch.empty((NUM_OVERFLOW, case.m), dtype=torch.float32, device=case.device)
    gradient = torch.empty((case.m, case.D), dtype=torch.float32, device=case.device)
    _overflow(
        key, (case.m, 1, 1), 8, 1, *pairs, counts, lowest, similarities, rows, violations, sums, gradient,
        case.m, case.M, s.plan.capacity, case.loss.margin, case.exclude_id, case.exclude_slot, case.D, 64, 64, 64,
    )  # fmt: skip
    return sums, gradient
