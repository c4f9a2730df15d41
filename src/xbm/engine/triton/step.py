"""One step: the loss, its gradients and the statistics, from raw inputs to results, without ever waiting for the device.

    contrastive, small sum   meet, finish                                   one pass; positives count as they are met
    contrastive, otherwise   mark, count, enlist, meet, finish              coefficients are known only at the end
    multi-similarity         mark, count, enlist, meet, finish              the positives decide which negatives are valid
    triplet                  mark, count, enlist, meet, (crowded,) finish   and a negative's weight is its rank among them
    gradient of the rows     + spread
    batch against itself     clean + the above + spread

The tensor cores multiply the anchors in the rows' type: with a half bank the anchors are rounded to it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xbm.checks import tolerance
from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss, from_spec
from xbm.engine.triton import crowded, finish, negatives, positives, rows, tiles
from xbm.engine.triton.plan import COLUMNS, PARTS, PLACES, Plan, plan
from xbm.kernels.launch import Kernel, number, on_device_of

mark, count, enlist, meet, end, spread, clean, crowd = (
    Kernel(each, overlap=True)
    for each in (
        positives.mark, positives.count, positives.enlist, negatives.meet, finish.finish, rows.spread, rows.clean,
        crowded.crowded,
    )
)  # fmt: skip

BOTH, CONTRASTIVE, MULTI_SIMILARITY, TRIPLET = range(4)  # as in tiles.py
NO_SLOT, GIVEN_SLOT, NEWEST_ROWS, SAME_PLACE = range(4)

REDUCTIONS = ("sum", "mean", "balanced")  # as in tiles.py
SUM = 0

# Rows of a small bank: many of its tiles have valid pairs, and few rows are left to look through. A large one finds positives
# first (contrastive), looks at labels only in tiles that count, and leaves fetching to the copy engine.
SMALL = 1 << 18
TWO_GRADIENTS = 64  # columns up to which the positives' gradient fits beside the negatives'


class Found(NamedTuple):
    loss: Tensor  # ()
    gradient: Tensor  # (m, D), of the mean loss; in a batch of the anchors as anchors and as rows
    row_gradient: Tensor | None  # (M, D)
    counts: Tensor | None  # (2, m), valid positives and negatives
    extremes: Tensor | None  # (3, m), hardest negative, easiest and hardest positive
    unsound: Tensor | None  # ()


class Constants(NamedTuple):
    kind: int
    reduction: int
    margin: float
    alpha: float = 1.0
    beta: float = 1.0
    base: float = 0.0


def constants(loss: Any, small: bool, D: int) -> Constants:
    reduction = REDUCTIONS.index(loss.reduction)
    if loss.name == "contrastive":
        together = small and (reduction == SUM or D <= TWO_GRADIENTS)
        return Constants(BOTH if together else CONTRASTIVE, reduction, float(loss.margin))
    if loss.name == "triplet":
        return Constants(TRIPLET, reduction, float(loss.margin))
    return Constants(MULTI_SIMILARITY, reduction, *map(float, (loss.epsilon, loss.alpha, loss.beta, loss.base)))


class Case(NamedTuple):
    """All of a step but the numbers in it: what makes two steps run different kernels, or the same on different grids."""

    spec: str  # of the loss
    m: int
    M: int
    D: int
    device: torch.device
    given: torch.dtype
    bank: torch.dtype
    stats: bool
    in_batch: bool
    gradients: bool
    row_gradient: bool
    has_ids: bool
    has_sound: bool
    by_id: bool
    by_slot: int
    small: bool  # whether the bank is, see SMALL


class Settled(NamedTuple):
    """What follows from a case."""

    constants: Constants
    plan: Plan
    key: int  # under which compiled kernels are found again
    half: bool
    rises: bool  # whether exponentials could leave their range, so that the pass has to follow the largest
    headroom: float
    scale: float
    tolerance: float
    described: bool  # whether the copy engine fetches the rows


@lru_cache(maxsize=1024)
def settle(case: Case) -> Settled:
    c = constants(from_spec(case.spec), case.small, case.D)
    half = case.bank != torch.float32
    p = plan(case.m, case.M, case.D, half, c.kind >= MULTI_SIMILARITY, case.device)
    headroom, scale = 60.0, 1.0
    if c.kind == TRIPLET:
        scale = 2.0**-10
    elif c.kind == MULTI_SIMILARITY and case.bank == torch.float16:
        headroom, scale = 6.0, 64.0
    rises = c.beta * (1.02 - c.base) > headroom
    key = number(c.kind, c.reduction, rises, p.tiles, *case[1:])
    return Settled(c, p, key, half, rises, headroom, scale, tolerance(case.given), not case.small and half and p.tiles.narrow)


@on_device_of(1)
def step(
    loss: Loss, given: Tensor, pairing: Pairing, stats: bool, in_batch: bool, gradients: bool, row_gradient: bool
) -> Found:
    """`gradients`: whether the anchors' is wanted (it always comes, but a batch's part as rows costs a pass of its own)."""
    device = given.device
    given, bank, labels = given.contiguous(), pairing.rows.contiguous(), pairing.labels.contiguous()
    row_labels, stamps = pairing.row_labels.contiguous(), pairing.stamps.contiguous()
    ids, row_ids, own = (x if x is None else x.contiguous() for x in (pairing.ids, pairing.row_ids, pairing.own))
    pointer, latest = pairing.latest or (None, None)
    (m, D), M, sound = given.shape, row_labels.shape[0], pairing.sound
    by_id, has_ids = row_ids is not None, ids is not None
    by_slot = NO_SLOT
    if own is not None:
        by_slot = GIVEN_SLOT
    elif latest is not None:
        by_slot = NEWEST_ROWS
    elif in_batch and not by_id:
        by_slot = SAME_PLACE
    case = Case(
        loss.spec, m, M, D, device, given.dtype, bank.dtype, stats, in_batch, gradients, row_gradient,
        has_ids, sound is not None, by_id, by_slot, M <= SMALL,
    )  # fmt: skip
    c, p, settled, half, rises, headroom, scale, tol, by_copy_engine = settle(case)
    t, cap = p.tiles, p.capacity
    places_of = given.data_ptr() | bank.data_ptr() | stamps.data_ptr() | labels.data_ptr() | row_labels.data_ptr()
    for x in (ids, row_ids, own):
        if x is not None:
            places_of |= x.data_ptr()
    key = None if places_of % 16 else settled  # None: compiled for other alignments, which Triton has to look at

    if in_batch or row_gradient:
        kept, written = torch.empty_like(given), torch.empty_like(labels)
        clean(key, (m, 1, 1), 4, 2, given, ids, sound, kept, written, tol, D, has_ids, sound is not None, 512)
        anchors = kept
        if in_batch:
            bank, stamps = kept, written
    else:
        anchors = given

    def real(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    work = real(p.splits * m * D + tiles.SUMS.value * m * p.splits + tiles.FOUND.value * m + 1)
    who = (row_labels, stamps, row_ids, labels, ids, own, pointer)
    totals = lowest = highest = listed = places = beaten = crowd_found = crowd_gradient = None
    if c.kind != BOTH:
        table = torch.empty(PLACES, dtype=torch.int16, device=device)
        counts = torch.empty((m, p.scans), dtype=torch.int32, device=device)
        totals, places, beaten = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((m,), (m, cap), (m, cap)))
        lowest, highest, listed = real(m), real(m), real(m, cap)
        mark(key, (1 + p.clears, 1, 1), 16, 1, labels, table, counts, m, p.scans, PLACES, 1024, 8192)
        count(key, (p.lookups, 1, 1), 4, 1, row_labels, labels, table, counts, m, M, p.scanned, p.scans, PLACES, 1024)
        enlist(
            key, (m, 1, 1), 8, 2, anchors, bank, *who, table, counts, totals, lowest, highest, listed, places, beaten,
            m, M, p.scanned, p.scans, p.group, cap, by_id, by_slot, D, PLACES, p.scans_padded, 1024, 16, 128,
            p.scanned <= 1024,
        )  # fmt: skip
    apart = c.kind == BOTH and c.reduction != SUM
    pulls = real(p.splits, m, D) if apart else None
    described = None
    if by_copy_engine:
        described = TensorDescriptor(bank, [M, D], [D, 1], [t.rows, t.columns])
    meet(
        key, (p.blocks, p.splits, 1), t.warps, t.stages, anchors, bank, *who, totals, lowest, listed, beaten,
        work, pulls, described, m, M, p.per, p.splits, cap, c.margin, c.beta, c.base,
        c.kind, stats, by_id, by_slot, D, t.anchors, t.rows, t.columns, t.step, t.narrow, half, t.stages if t.narrow else 1,
        stats or case.small, t.rows > M, rises, headroom, scale, t.precision, apart,
    )  # fmt: skip
    if c.kind == TRIPLET and cap < M:
        crowd_found, crowd_gradient = real(tiles.CROWD, m), real(m, D)
        crowd(
            key, (m, 1, 1), 8, 1, anchors, bank, *who, totals, lowest, listed, places, beaten, crowd_found, crowd_gradient,
            m, M, cap, c.margin, by_id, by_slot, D, 64, 64, 64,
        )  # fmt: skip

    value = real()
    as_rows = in_batch and gradients
    gradient = real(m, D) if as_rows else torch.empty_like(given)
    valid = torch.empty((2, m), dtype=torch.int64, device=device) if stats else None
    extremes = real(3, m) if stats else None
    unsound = torch.empty((), dtype=torch.int64, device=device) if stats else None
    end(
        key, (m, p.column_blocks, 1), 4, 2, given, anchors, bank, *who, latest, sound,
        totals, lowest, highest, listed, places, beaten, crowd_found, crowd_gradient, work, pulls,
        value, gradient, valid, extremes, unsound, m, M, p.splits, cap, tol, c.margin, c.alpha, c.beta, c.base,
        c.kind, c.reduction, stats, has_ids, sound is not None, by_id, by_slot, D, COLUMNS,
        p.splits_padded, min(PARTS, p.splits_padded), 16, 128, scale, cap < M,
    )  # fmt: skip
    of_rows = None
    if row_gradient or as_rows:
        of_rows = torch.empty_like(given if as_rows else bank)
        spread(
            key, (-(-M // 64), -(-D // 128), 1), 8, 2, anchors, bank, *who, totals, listed, places, beaten, work,
            gradient, of_rows, m, M, p.splits, cap, c.margin, c.alpha, c.beta, c.base,
            c.kind, as_rows, by_id, by_slot, D, 64, 64, 128, t.step, "ieee",
        )  # fmt: skip
        if as_rows:
            gradient, of_rows = of_rows, None
    return Found(value, gradient, of_rows, valid, extremes, unsound)
