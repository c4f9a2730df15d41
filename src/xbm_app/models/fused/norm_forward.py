# mypy: disable-error-code="no-untyped-def"
"""Batch normalisation forward: one pass for the statistics, one that normalises, adds another map if there is one, and
activates.

Variances are sums of squares about a shift, the mean of a program's first tile, and programs' results are merged about a shift
again (Chan, Golub and LeVeque, 1983), by the program that finishes last, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.kernels import Kernel
from xbm_app.models.fused import tiling
from xbm_app.models.fused.layout import as_rows, vector
from xbm_app.models.fused.tiling import SIZES, cut, key, on

NONE, RELU, RELU6 = (tl.constexpr(x) for x in range(3))
MERGED = tl.constexpr(64)  # programs' results that are read at once


@triton.jit
def rows_of(split, P, splits, BP: tl.constexpr):
    """How many pixels a program has: whole tiles, but for the one with the last tile."""
    tiles = tl.cdiv(P, BP)
    many = (tiles - split + splits - 1) // splits * BP
    return many - tl.where(split == (tiles - 1) % splits, tiles * BP - P, 0)


@triton.jit
def normalised(x, mean, invstd, weight, bias):
    """What both directions must agree on to the last bit, or the gradient's mask would not be the output's."""
    return (x - mean[None, :]) * (invstd * weight)[None, :] + bias[None, :]


@triton.jit
def of_channels(weight, bias, stats, c, here_c, C):
    """A block of channels' mean, 1/std, weight and bias."""
    mean = tl.load(stats + c, mask=here_c, other=0.0)
    invstd = tl.load(stats + C + c, mask=here_c, other=0.0)
    w = tl.load(weight + c, mask=here_c, other=0.0)
    return mean, invstd, w, tl.load(bias + c, mask=here_c, other=0.0)


@triton.jit
def merged(partials, c, here_c, C, P, splits, BP: tl.constexpr, BC: tl.constexpr):
    """All programs' mean and sum of squared deviations from it."""
    origin = tl.load(partials + c, mask=here_c, other=0.0, cache_modifier=".cg")
    sums = tl.zeros((MERGED, BC), tl.float32)
    squares = tl.zeros((MERGED, BC), tl.float32)
    for start in range(0, splits, MERGED):
        s = start + tl.arange(0, MERGED)
        here = (s < splits)[:, None] & here_c[None, :]
        at = s[:, None] * C + c[None, :]
        d = tl.load(partials + at, mask=here, other=0.0, cache_modifier=".cg")
        d = tl.where(here, d - origin[None, :], 0.0)
        many = rows_of(s, P, splits, BP).to(tl.float32)[:, None]
        sums += many * d
        squares += many * d * d + tl.load(partials + splits * C + at, mask=here, other=0.0, cache_modifier=".cg")
    n = P.to(tl.float32)
    away = tl.sum(sums, 0) / n
    return origin + away, not_below_zero(tl.sum(squares, 0) - n * away * away)


@triton.jit
def not_below_zero(x):
    """NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit(do_not_specialize=SIZES)
def statistics(
    x,  # (P, C), pixels `stride` apart, both in units of VEC channels
    partials,  # (2, splits, C), out: means and sums of squared deviations
    tickets,  # (blocks,) zeros: how many programs of a block of channels are done
    stats,  # (2, C), out: mean, 1/√(variance + eps)
    running_mean, running_var, batches,  # changed in place
    P, units, stride, splits, momentum, eps,
    BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    C = units * VEC
    c = block * BC + tl.arange(0, BC)
    here_c = c < C
    r = tl.arange(0, BP)
    first = split * BP
    here = (first + r < P)[:, None] & here_c[None, :]
    v = tl.load(x + (first + r).to(tl.int64)[:, None] * (stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
    shift = tl.sum(v, 0) / tl.minimum(P - first, BP).to(tl.float32)
    sums = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for start in range(first, P, splits * BP):
        p = start + r
        here = (p < P)[:, None] & here_c[None, :]
        v = tl.load(x + p.to(tl.int64)[:, None] * (stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        d = tl.where(here, v - shift[None, :], 0.0)
        sums += d
        squares += d * d
    n = rows_of(split, P, splits, BP).to(tl.float32)
    away = tl.sum(sums, 0) / n
    spread = not_below_zero(tl.sum(squares, 0) - n * away * away)
    tl.store(partials + split * C + c, shift + away, mask=here_c)
    tl.store(partials + (splits + split) * C + c, spread, mask=here_c)

    tl.debug_barrier()
    if tl.atomic_add(tickets + block, 1, sem="acq_rel") == splits - 1:
        mean, whole = merged(partials, c, here_c, C, P, splits, BP, BC)
        tl.store(stats + c, mean, mask=here_c)
        tl.store(stats + C + c, 1.0 / tl.sqrt_rn(whole / P + eps), mask=here_c)
        old = tl.load(running_mean + c, mask=here_c, other=0.0)
        tl.store(running_mean + c, (1.0 - momentum) * old + momentum * mean, mask=here_c)
        old = tl.load(running_var + c, mask=here_c, other=0.0)
        tl.store(running_var + c, (1.0 - momentum) * old + momentum * (whole / (P - 1)), mask=here_c)
        if block == 0:
            tl.store(batches, tl.load(batches) + 1)
        tl.store(tickets + block, 0)


@triton.jit(do_not_specialize=SIZES)
def normalise(
    x, y, more, weight, bias, stats, P, units, stride, more_stride, splits,
    ACT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here_c = c < C
    mean, invstd, w, b = of_channels(weight, bias, stats, c, here_c, C)
    last = (tl.cdiv(P, BP) - 1) * BP
    for done in range(tl.program_id(1) * BP, last + BP, splits * BP):
        p = last - done + tl.arange(0, BP)
        here = (p < P)[:, None] & here_c[None, :]
        v = tl.load(x + p.to(tl.int64)[:, None] * (stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        v = normalised(v, mean, invstd, w, b)
        if more is not None:
            at = p.to(tl.int64)[:, None] * (more_stride * VEC) + c[None, :]
            v += tl.load(more + at, mask=here, other=0.0).to(tl.float32)
        if ACT != NONE:
            v = not_below_zero(v)
        if ACT == RELU6:
            v = tl.where(v > 6.0, 6.0, v)
        tl.store(y + p.to(tl.int64)[:, None] * C + c[None, :], v.to(y.dtype.element_ty), mask=here)


_statistics, _normalise = Kernel(statistics), Kernel(normalise)


def forward(
    x: Tensor, stride: int, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor,
    tickets: Tensor, momentum: float, eps: float, act: int, more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The activated map, channels-last, and (2, C): mean and 1/√(variance + eps). The running statistics move.

    `more`: a map that is added before the activation.
    """
    C, P = x.shape[1], x.numel() // x.shape[1]
    more, more_stride = (None, C) if more is None else as_rows(more)
    vec = vector(C, stride, more_stride)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    stats = torch.empty((2, C), dtype=torch.float32, device=x.device)
    with on(x.device):
        k = cut(P, C, tiling.STATISTICS, x.device)
        partials = torch.empty((2, k.splits, C), dtype=torch.float32, device=x.device)
        tensors: tuple[Tensor, ...] = (x, partials, tickets, stats, running_mean, running_var, batches)
        constants: tuple[int, ...] = (k.pixels, k.channels, vec)
        sizes = (P, C // vec, stride // vec, k.splits)
        same = key(x.device, tensors, k.warps, *constants)
        _statistics(same, k.grid, k.warps, 1, *tensors, *sizes, float(momentum), float(eps), *constants)
        k = cut(P, C, tiling.EACH, x.device)
        maps = (x, y, more, weight, bias, stats)
        constants = (act, k.pixels, k.channels, vec)
        same = key(x.device, maps, k.warps, *constants)
        _normalise(same, k.grid, k.warps, 1, *maps, *sizes[:3], more_stride // vec, k.splits, *constants)
    torch.autograd.graph.increment_version((running_mean, running_var, batches))
    return y, stats
