# mypy: disable-error-code="no-untyped-def"
"""Batch normalisation backward: one pass for the sums that all pixels of a channel share, one for the gradient.

With x̂ = (x − mean)/std and g the incoming gradient where the activation let x pass:
∂bias = Σ g, ∂weight = Σ g·x̂, ∂x = weight/std · (g − ∂bias/P − x̂·∂weight/P).
Where another map was added before the activation, g is its gradient too, and is written out by the first pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.kernels import Kernel
from xbm_app.models.fused import tiling
from xbm_app.models.fused.layout import as_rows, vector
from xbm_app.models.fused.norm_forward import MERGED, NONE, RELU6, normalised, of_channels
from xbm_app.models.fused.tiling import SIZES, cut, key, on


@triton.jit
def passed(dy, x, mean, invstd, weight, bias, ACT: tl.constexpr, TYPE: tl.constexpr):
    """The gradient before the activation. The output is made anew, rounded as it was stored."""
    g = dy
    if ACT != NONE:
        g = masked(g, normalised(x, mean, invstd, weight, bias).to(TYPE), ACT)
    return g


@triton.jit
def masked(g, y, ACT: tl.constexpr):
    """The gradient where the activation, whose output was y, let its input pass."""
    y = y.to(tl.float32)
    g = tl.where(y <= 0.0, 0.0, g)
    if ACT == RELU6:
        g = tl.where(y >= 6.0, 0.0, g)
    return g


@triton.jit
def added(partials, c, here_c, C, splits, BC: tl.constexpr):
    """All programs' sums, always in the same order."""
    sums = tl.zeros((MERGED, BC), tl.float32)
    for start in range(0, splits, MERGED):
        s = start + tl.arange(0, MERGED)
        here = (s < splits)[:, None] & here_c[None, :]
        sums += tl.load(partials + s[:, None] * C + c[None, :], mask=here, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=SIZES)
def reduce(
    dy, x, weight, bias, stats,
    y,  # the output where another map was added, else None
    g_out,  # (P, C), out: its gradient
    partials,  # (2, splits, C), out: Σ g·x̂ and Σ g of a program's pixels
    tickets,  # (blocks,) zeros: how many programs of a block of channels are done
    of_weight, of_bias,  # (C,), out
    P, units, stride, dy_stride, splits,
    ACT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    C = units * VEC
    c = block * BC + tl.arange(0, BC)
    here_c = c < C
    mean, invstd, w, b = of_channels(weight, bias, stats, c, here_c, C)
    sums = tl.zeros((BP, BC), tl.float32)
    products = tl.zeros((BP, BC), tl.float32)
    for start in range(split * BP, P, splits * BP):
        p = start + tl.arange(0, BP)
        here = (p < P)[:, None] & here_c[None, :]
        p = p.to(tl.int64)[:, None]
        v = tl.load(x + p * (stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = tl.load(dy + p * (dy_stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        if y is None:
            g = passed(g, v, mean, invstd, w, b, ACT, x.dtype.element_ty)
        else:
            at = p * C + c[None, :]
            if ACT != NONE:
                g = masked(g, tl.load(y + at, mask=here, other=0.0), ACT)
            tl.store(g_out + at, g.to(g_out.dtype.element_ty), mask=here)
        sums += g
        products += g * (v - mean[None, :])
    tl.store(partials + split * C + c, tl.sum(products, 0) * invstd, mask=here_c)
    tl.store(partials + (splits + split) * C + c, tl.sum(sums, 0), mask=here_c)

    tl.debug_barrier()
    if tl.atomic_add(tickets + block, 1, sem="acq_rel") == splits - 1:
        tl.store(of_weight + c, added(partials, c, here_c, C, splits, BC), mask=here_c)
        tl.store(of_bias + c, added(partials + splits * C, c, here_c, C, splits, BC), mask=here_c)
        tl.store(tickets + block, 0)


@triton.jit(do_not_specialize=SIZES)
def spread(
    dy, x, dx, weight, bias, stats, of_weight, of_bias, P, units, stride, dy_stride, splits,
    ACT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here_c = c < C
    mean, invstd, w, b = of_channels(weight, bias, stats, c, here_c, C)
    n = P.to(tl.float32)
    level = (tl.load(of_bias + c, mask=here_c, other=0.0) / n)[None, :]
    slope = (tl.load(of_weight + c, mask=here_c, other=0.0) / n * invstd)[None, :]
    scale = (invstd * w)[None, :]
    last = (tl.cdiv(P, BP) - 1) * BP
    for done in range(tl.program_id(1) * BP, last + BP, splits * BP):
        p = last - done + tl.arange(0, BP)
        here = (p < P)[:, None] & here_c[None, :]
        p = p.to(tl.int64)[:, None]
        v = tl.load(x + p * (stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = tl.load(dy + p * (dy_stride * VEC) + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = passed(g, v, mean, invstd, w, b, ACT, x.dtype.element_ty)
        g = scale * (g - level - (v - mean[None, :]) * slope)
        tl.store(dx + p * C + c[None, :], g.to(dx.dtype.element_ty), mask=here)


_reduce, _spread = Kernel(reduce), Kernel(spread)


def backward(
    dy: Tensor, x: Tensor, stride: int, weight: Tensor, bias: Tensor, stats: Tensor, tickets: Tensor, act: int, inputs: bool,
    y: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of x (channels-last; None unless `inputs`), weight, bias, and of a map that was added.

    `y`: the output, channels-last, where a map was added; None otherwise, and its gradient too.
    """
    dy, dy_stride = as_rows(dy)
    C, P = x.shape[1], x.numel() // x.shape[1]
    vec = vector(C, stride, dy_stride)
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
    sizes = (P, C // vec, stride // vec, dy_stride // vec)
    of_more = None if y is None else torch.empty_like(y)
    with on(x.device):
        k = cut(P, C, tiling.SUMS, x.device)
        partials = torch.empty((2, k.splits, C), dtype=torch.float32, device=x.device)
        tensors: tuple[Tensor | None, ...] = (dy, x, weight, bias, stats, y, of_more, partials, tickets, of_weight, of_bias)
        constants = (act, k.pixels, k.channels, vec)
        _reduce(key(x.device, tensors, k.warps, *constants), k.grid, k.warps, 1, *tensors, *sizes, k.splits, *constants)
        if not inputs:
            return None, of_weight, of_bias, of_more
        if of_more is not None:  # what the activation let pass
            dy, act, sizes = of_more, NONE.value, (*sizes[:3], C // vec)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        k = cut(P, C, tiling.EACH, x.device)
        tensors = (dy, x, dx, weight, bias, stats, of_weight, of_bias)
        constants = (act, k.pixels, k.channels, vec)
        _spread(key(x.device, tensors, k.warps, *constants), k.grid, k.warps, 1, *tensors, *sizes, k.splits, *constants)
    return dx, of_weight, of_bias, of_more
