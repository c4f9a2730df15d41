# mypy: disable-error-code="no-untyped-def"
"""Device functions, codes and the workspace layout that all kernels of the engine share.

Names in the kernels: `offs_m` are anchors, `offs_n` rows of the bank, `offs_d` columns of a gradient, `offs_k` columns that a
product sums over; BLOCK_M, BLOCK_N, BLOCK_D and BLOCK_K are their numbers. m, M and D are the sizes of the whole problem.
"""

import triton
import triton.language as tl

from xbm.kernels import overlaps

# Sizes that change from call to call: kernels are not compiled again for their values.
SIZES = ["m", "M", "rows_per_split", "num_splits", "rows_per_part", "num_parts", "group", "capacity"]
INF = tl.constexpr(float("inf"))
# Finite stand-ins for -inf, whose differences are not NaN: the exponent of a log-sum-exp without terms, and no floor.
NO_PEAK = tl.constexpr(-1e30)
NO_FLOOR = tl.constexpr(-3e38)
OVERLAP = tl.constexpr(overlaps())

# KIND: the loss. The contrastive loss has two variants: one finds positives during the pass over the bank, the other before.
# From SUP_CON on, the negatives enter a log-sum-exp in which all of them count; `loss_formulas` has what differs.
CONTRASTIVE_ONE_PASS, CONTRASTIVE, MULTI_SIMILARITY, TRIPLET, MARGIN, SUP_CON, LIFTED_STRUCTURE, N_PAIRS, CIRCLE = (
    tl.constexpr(x) for x in range(9)
)
SUM, MEAN, BALANCED = (tl.constexpr(x) for x in range(3))  # REDUCTION
# EXCLUDE_SLOT: which row is the anchor itself. EXCLUDE_ID: rows with the anchor's instance id are excluded too.
NO_SLOT, GIVEN_SLOT, NEWEST_SLOT, SAME_INDEX = (tl.constexpr(x) for x in range(4))

# The workspace, float32: gradients (num_splits, m, D), partial sums, results per anchor, and a counter.
# Partial sums, each (m, num_splits): what one program found for one anchor. EXTRA depends on the loss: the number of positives
# (contrastive), the exponent from which terms are measured (log-sum-exps), the number of triplets, or Σ weight (margin).
VALUE, NUM_NEGATIVES, EXTRA, HARDEST_NEGATIVE, EASIEST_POSITIVE, HARDEST_POSITIVE, POSITIVE_VALUE = (
    tl.constexpr(x) for x in range(7)
)
NUM_PARTIALS = tl.constexpr(7)
# Results, each (m,).
LOSS, SOUND, NEGATIVE_WEIGHT, POSITIVE_WEIGHT, NEGATIVE_PEAK, POSITIVE_PEAK, FLOOR, CEILING = (
    tl.constexpr(x) for x in range(8)
)
NUM_RESULTS = tl.constexpr(8)
# Results of the slow path for anchors with more positives than a list holds, each (m,), in a tensor of their own.
OVERFLOW_VALUE, OVERFLOW_TRIPLETS, OVERFLOW_NEGATIVES, OVERFLOW_POSITIVES = (tl.constexpr(x) for x in range(4))
NUM_OVERFLOW = 4


def workspace_size(m: int, num_splits: int, D: int) -> int:
    return num_splits * m * D + NUM_PARTIALS.value * m * num_splits + NUM_RESULTS.value * m + 1


@triton.jit
def partials_ptr(workspace, m, num_splits, D: tl.constexpr):
    return workspace + num_splits * m * D


@triton.jit
def results_ptr(workspace, m, num_splits, D: tl.constexpr):
    return workspace + num_splits * m * D + NUM_PARTIALS * m * num_splits


@triton.jit
def counter_ptr(workspace, m, num_splits, D: tl.constexpr):
    return (results_ptr(workspace, m, num_splits, D) + NUM_RESULTS * m).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def wait_for_previous():
    """The first line of every kernel that is launched with overlap: its inputs may not have been written yet."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_sound(
    given, anchor, ids, sound, tolerance, D: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Whether an anchor is finite and of unit length, its id is not negative, and the caller has not ruled it out."""
    squares = tl.zeros((BLOCK_K,), tl.float32)  # reduced once, at the end: every reduction synchronizes all threads
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x = tl.load(given + anchor.to(tl.int64) * D + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
        squares += x * x
    good = tl.abs(tl.sqrt(tl.sum(squares, 0)) - 1.0) <= tolerance  # False for NaN too
    if HAS_IDS:
        good = good & (tl.load(ids + anchor) >= 0)
    if HAS_SOUND:
        good = good & (tl.load(sound + anchor) != 0)
    return good


@triton.jit
def as_int32(pointer):
    """An int64 pointer as int32: low words at even offsets, high words at odd ones."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_words(words, offs_n, mask_n, MASKED: tl.constexpr):
    """Every other 32-bit word of a tile's rows."""
    if MASKED:
        return tl.load(words + 2 * offs_n, mask=mask_n, other=-1)
    else:
        return tl.load(words + 2 * offs_n)


@triton.jit
def load_rows(tile, offs_n, offs_d, mask_n, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """(BLOCK_N, BLOCK_D): rows of a tile, zero beyond the bank and beyond D."""
    ptrs = tile + (offs_n[:, None] * D + offs_d[None, :])
    if MASKED:
        return tl.load(ptrs, mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
    elif D % BLOCK_D == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(offs_d < D)[None, :] & (offs_n >= 0)[:, None], other=0.0)


@triton.jit
def load_anchors(anchors, rows, workspace, offs_m, clamped_m, offs_d, split, m, D: tl.constexpr, HALF: tl.constexpr):
    """(BLOCK_M, BLOCK_D): a block of anchors in the rows' type.

    The tensor cores read them from shared memory only if they come straight from a load. So rounded anchors are written to
    where this program will store its gradient at the end, and are loaded from there.
    """
    mask = (offs_m < m)[:, None] & (offs_d < D)[None, :]
    a = tl.load(anchors + clamped_m.to(tl.int64)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    if a.dtype == rows.dtype.element_ty:
        return a
    elif HALF:
        scratch = (workspace + split.to(tl.int64) * m * D).to(tl.pointer_type(rows.dtype.element_ty), bitcast=True)
        ptrs = scratch + 2 * clamped_m.to(tl.int64)[:, None] * D + offs_d[None, :]
        tl.store(ptrs, a.to(rows.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        return a.to(rows.dtype.element_ty)


@triton.jit
def load_keys(base_row, offs_n, mask_n, stamps, row_labels, row_ids, EXCLUDE_ID: tl.constexpr, MASKED: tl.constexpr):
    """What decides which pairs of a tile count: the high words of stamps, and both words of labels and ids."""
    stamp_high = load_words(as_int32(stamps) + 2 * base_row + 1, offs_n, mask_n, MASKED)
    words = as_int32(row_labels) + 2 * base_row
    row_low, row_high = load_words(words, offs_n, mask_n, MASKED), load_words(words + 1, offs_n, mask_n, MASKED)
    if EXCLUDE_ID:
        words = as_int32(row_ids) + 2 * base_row
        id_low, id_high = load_words(words, offs_n, mask_n, MASKED), load_words(words + 1, offs_n, mask_n, MASKED)
        return stamp_high, row_low, row_high, id_low, id_high
    else:
        return stamp_high, row_low, row_high, row_low, row_high


@triton.jit
def self_slots(own, pointer, offs_m, m, M, EXCLUDE_SLOT: tl.constexpr):
    """The row that is the anchor itself, -1 if there is none."""
    slot = offs_m - offs_m - 1
    if EXCLUDE_SLOT == GIVEN_SLOT:
        slot = tl.load(own + offs_m).to(tl.int32)
    if EXCLUDE_SLOT == NEWEST_SLOT:
        age = m - offs_m  # in rows
        slot = tl.load(pointer).to(tl.int32) - age
        slot = tl.where(slot < 0, slot + M, slot)
        slot = tl.where(age <= M, slot, -1)
    if EXCLUDE_SLOT == SAME_INDEX:
        slot = offs_m
    return slot


@triton.jit
def candidate_mask(offs_n, mask_n, stamps, row_ids, anchor_ids, slots, EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr):
    """(BLOCK_M or 1, BLOCK_N): rows that were written and are not the anchor itself. `anchor_ids`, `slots`: (BLOCK_M,)."""
    mask = (tl.load(stamps + offs_n, mask=mask_n, other=-1) >= 0)[None, :]
    if EXCLUDE_ID:
        mask = mask & (tl.load(row_ids + offs_n, mask=mask_n, other=-1)[None, :] != anchor_ids[:, None])
    if EXCLUDE_SLOT != NO_SLOT:
        mask = mask & (offs_n[None, :] != slots[:, None])
    return mask


@triton.jit
def positive_mask(
    offs_n, mask_n, row_labels, stamps, row_ids, label, anchor_id, slot,
    EXCLUDE_ID: tl.constexpr, EXCLUDE_SLOT: tl.constexpr, LIKELY: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N,): which rows are positives of one anchor. `anchor_id`, `slot`: (1,).

    Unless positives are LIKELY, few blocks hold one, and stamps and ids are loaded only for those.
    """
    positive = mask_n & (tl.load(row_labels + offs_n, mask=mask_n, other=0) == label)
    if LIKELY or tl.max(positive.to(tl.int32), 0) > 0:
        candidates = candidate_mask(offs_n, mask_n, stamps, row_ids, anchor_id, slot, EXCLUDE_ID, EXCLUDE_SLOT)
        positive = positive & (tl.max(candidates.to(tl.int32), 0) > 0)
    return positive


@triton.jit
def block_similarities(
    anchors, rows, offs_m, offs_n, mask_m, mask_n, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N): products of anchors and rows, summed over BLOCK_K columns at a time.

    float32 sums are compensated (Kahan). Over thousands of columns, plain rounding errors would be too large for a loss that
    exponentiates fifty times the similarity.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    compensation = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    anchor_offs = offs_m.to(tl.int64)[:, None] * D
    row_offs = offs_n.to(tl.int64)[:, None] * D
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a = tl.load(anchors + anchor_offs + offs_k[None, :], mask=mask_m[:, None] & (offs_k < D)[None, :], other=0.0)
        v = tl.load(rows + row_offs + offs_k[None, :], mask=mask_n[:, None] & (offs_k < D)[None, :], other=0.0)
        if v.dtype == tl.float32:
            product = tl.dot(a.to(v.dtype), tl.trans(v), input_precision=PRECISION) - compensation
            total = acc + product
            compensation = (total - acc) - product
            acc = total
        else:
            acc = tl.dot(a.to(v.dtype), tl.trans(v), acc)
    return acc


@triton.jit
def anchor_similarities(anchors, rows, anchor, offs_n, mask, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N,): products of one anchor and the masked rows."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, D, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a = tl.load(anchors + anchor.to(tl.int64) * D + offs_k, mask=offs_k < D, other=0.0)
        mask_v = mask[:, None] & (offs_k < D)[None, :]
        v = tl.load(rows + offs_n.to(tl.int64)[:, None] * D + offs_k[None, :], mask=mask_v, other=0.0)
        acc += v.to(tl.float32) * a.to(v.dtype).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def log1p_exp_sum(mass, peak):
    """log(1 + Σ e^logit) from mass = Σ e^{logit − peak}, with peak ≥ 0. Exact for tiny sums too."""
    u = 1.0 + mass
    small = tl.where(u == 1.0, mass, tl.log(u) * (mass / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(peak > 0, peak + tl.log(tl.exp(-peak) + mass), small)
