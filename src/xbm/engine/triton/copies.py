# mypy: disable-error-code="no-untyped-def"
"""Where a queue holds the newest copy of each anchor's image: every row's id is looked up in a table of the anchors' ids, as
labels are for the positives, and the most recent of the rows with an id is its maximum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.engine.triton import positives
from xbm.engine.triton.plan import MOST, PLACES
from xbm.engine.triton.positives import place_in_table
from xbm.engine.triton.tiles import SIZES
from xbm.kernels.launch import Kernel, await_others, number, on_device_of


@triton.jit(do_not_specialize=SIZES)
def seek(ids, row_ids, stamps, pointer, table, newest, m, M, PLACES: tl.constexpr, BN: tl.constexpr):
    """newest: (m,) zeros, changed in place: 1 for the oldest row of the queue, M for the newest."""
    await_others()
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    here = j < M
    row_id = tl.load(row_ids + j, mask=here, other=-1)
    owner = tl.load(table + place_in_table(row_id, PLACES), mask=here, other=0).to(tl.int32)
    same = (owner > 0) & (tl.load(ids + tl.maximum(owner - 1, 0), mask=owner > 0, other=0) == row_id)
    several = here & (owner < 0)
    if tl.max((same | several).to(tl.int32), 0) > 0:
        written = tl.load(stamps + j, mask=here, other=-1) >= 0
        oldest = tl.load(pointer).to(tl.int32)  # the slot before it was written last
        recency = 1 + tl.where(j >= oldest, j - oldest, j - oldest + M)
        # whole numbers: their maximum is the same in any order
        tl.atomic_max(newest + tl.maximum(owner - 1, 0), recency, mask=same & written, sem="relaxed")
        if tl.max(several.to(tl.int32), 0) > 0:
            for i in range(0, m):
                mine = several & written & (row_id == tl.load(ids + i))
                tl.atomic_max(newest + i + tl.zeros((BN,), tl.int32), recency, mask=mine, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def settle(ids, pointer, table, newest, slots, m, M, PLACES: tl.constexpr, BM: tl.constexpr):
    """slots: out, (m,)."""
    await_others()
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    owner = tl.load(table + place_in_table(tl.load(ids + i, mask=i < m, other=0), PLACES), mask=i < m, other=0).to(tl.int32)
    best = tl.load(newest + tl.where(owner > 0, owner - 1, i), mask=i < m, other=0)
    slot = best - 1 + tl.load(pointer).to(tl.int32)
    slot = tl.where(slot >= M, slot - M, slot)
    tl.store(slots + i, tl.where(best > 0, slot, -1).to(tl.int64), mask=i < m)


_mark, _seek, _settle = (Kernel(each, overlap=True) for each in (positives.mark, seek, settle))


@on_device_of(0)
def newest_copies(ids: Tensor, row_ids: Tensor, stamps: Tensor, pointer: Tensor) -> Tensor:
    """(m,): the slot that a queue wrote last among those with each id, -1 where there is none."""
    ids, m, M = ids.contiguous(), ids.shape[0], row_ids.shape[0]
    slots = torch.empty_like(ids)
    if m == 0:
        return slots
    if m > MOST:
        return torch.cat([newest_copies(some, row_ids, stamps, pointer) for some in ids.split(MOST)])
    table = torch.empty(PLACES, dtype=torch.int16, device=ids.device)
    newest = torch.empty(m, dtype=torch.int32, device=ids.device)
    key = number("copies", ids.device) if ids.data_ptr() % 16 == 0 else None
    _mark(key, (1 + triton.cdiv(m, 8192), 1, 1), 16, 1, ids, table, newest, m, 1, PLACES, 1024, 8192)
    _seek(key, (triton.cdiv(M, 1024), 1, 1), 4, 1, ids, row_ids, stamps, pointer, table, newest, m, M, PLACES, 1024)
    _settle(key, (triton.cdiv(m, 256), 1, 1), 4, 1, ids, pointer, table, newest, slots, m, M, PLACES, 256)
    return slots
