# mypy: disable-error-code="no-untyped-def"
"""Where a queue holds the newest copy of each anchor's image: a scan of the rows' ids, and a maximum over its parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.engine.triton.launch import Kernel, number
from xbm.engine.triton.plan import scan
from xbm.engine.triton.tiles import SIZES


@triton.jit(do_not_specialize=SIZES)
def seek(
    ids, row_ids, stamps, pointer,
    newest,  # out: (m, scans), how recent the newest copy in a part of the rows is, -1 if there is none
    m, M, per, scans, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    anchor_id = tl.load(ids + tl.minimum(i, m - 1))
    first = tl.program_id(1) * per
    last = tl.minimum(first + per, M)
    oldest = tl.load(pointer).to(tl.int32)  # the slot before it was written last
    best = tl.full((BM,), -1, tl.int32)
    for start in range(first, last, BN):
        j = start + tl.arange(0, BN)
        here = j < last
        same = (tl.load(row_ids + j, mask=here, other=-1)[None, :] == anchor_id[:, None]) & here[None, :]
        if tl.max(tl.max(same.to(tl.int32), 1), 0) > 0:
            written = tl.load(stamps + j, mask=here, other=-1) >= 0
            recency = tl.where(j >= oldest, j - oldest, j - oldest + M)
            best = tl.maximum(best, tl.max(tl.where(same & written[None, :], recency[None, :], -1), 1))
    tl.store(newest + i * scans + tl.program_id(1), best, mask=i < m)


@triton.jit(do_not_specialize=SIZES)
def settle(newest, pointer, slots, M, scans, BS: tl.constexpr):
    """slots: out, (m,)."""
    i = tl.program_id(0)
    best = tl.full((), -1, tl.int32)
    for start in range(0, scans, BS):
        s = start + tl.arange(0, BS)
        best = tl.maximum(best, tl.max(tl.load(newest + i * scans + s, mask=s < scans, other=-1), 0))
    slot = best + tl.load(pointer).to(tl.int32)
    slot = tl.where(slot >= M, slot - M, slot)
    tl.store(slots + i, tl.where(best >= 0, slot, -1).to(tl.int64))


_seek, _settle = Kernel(seek), Kernel(settle)


def newest_copies(ids: Tensor, row_ids: Tensor, stamps: Tensor, pointer: Tensor) -> Tensor:
    """(m,): the slot that a queue wrote last among those with each id, -1 where there is none."""
    if ids.device.type == "cuda" and ids.device.index != torch.cuda.current_device():
        with torch.cuda.device(ids.device):
            return newest_copies(ids, row_ids, stamps, pointer)
    ids, m, M = ids.contiguous(), ids.shape[0], row_ids.shape[0]
    slots = torch.empty_like(ids)
    if m == 0:
        return slots
    scans, per = scan(m, M, ids.device)
    newest = torch.empty((m, scans), dtype=torch.int32, device=ids.device)
    key = number(ids.device, m, M) if ids.data_ptr() % 16 == 0 else None
    _seek(key, (triton.cdiv(m, 64), scans, 1), 8, 2, ids, row_ids, stamps, pointer, newest, m, M, per, scans, 64, 256)
    _settle(key, (m, 1, 1), 1, 2, newest, pointer, slots, M, scans, 128)
    return slots
