# mypy: disable-error-code="no-untyped-def"
"""Local response normalization, channels-last: a pass each way. The scale is computed again in the backward pass, which costs
less than writing it in float32 and reading it back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from xbm.kernels.launch import Kernel
from xbm_app.models.fused import tiling
from xbm_app.models.fused.layout import as_rows, vector
from xbm_app.models.fused.tiling import SIZES, cut, key, on


@triton.jit
def channel(x, pixel, c, C, here):
    """Channels `c` of some pixels; 0 beyond the first and the last."""
    return tl.load(x + pixel + c, mask=here & (c >= 0) & (c < C), other=0.0).to(tl.float32)


@triton.jit
def power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@triton.jit(do_not_specialize=SIZES)
def respond(
    x, y, P, units, stride, splits, ALPHA: tl.constexpr, BETA: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """y = x · (1 + ALPHA · Σ x²)^−BETA, the sum over 5 adjacent channels."""
    C = units * VEC
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    for start in range(tl.program_id(1) * BP, P, splits * BP):
        p = start + tl.arange(0, BP)
        here = (p < P)[:, None]
        pixel = p.to(tl.int64)[:, None] * (stride * VEC)
        own = channel(x, pixel, c, C, here)
        total = own * own
        for k in tl.static_range(1, 3):
            below = channel(x, pixel, c - k, C, here)
            above = channel(x, pixel, c + k, C, here)
            total += below * below + above * above
        value = own * power(1.0 + ALPHA * total, -BETA)
        tl.store(y + p.to(tl.int64)[:, None] * C + c, value.to(y.dtype.element_ty), mask=here & (c < C))


@triton.jit(do_not_specialize=SIZES)
def respond_back(
    dy, x, dx, P, units, dy_stride, stride, splits, ALPHA: tl.constexpr, BETA: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """dx = dy · s^−BETA − 2 · ALPHA · BETA · x · Σ dy · x · s^(−BETA − 1), s the scale of each of 5 adjacent channels."""
    C = units * VEC
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    for start in range(tl.program_id(1) * BP, P, splits * BP):
        p = start + tl.arange(0, BP)
        here = (p < P)[:, None]
        pixel = p.to(tl.int64)[:, None] * (stride * VEC)
        dy_pixel = p.to(tl.int64)[:, None] * (dy_stride * VEC)
        x0 = channel(x, pixel, c - 4, C, here)  # x4 is channel c
        x1 = channel(x, pixel, c - 3, C, here)
        x2 = channel(x, pixel, c - 2, C, here)
        x3 = channel(x, pixel, c - 1, C, here)
        x4 = channel(x, pixel, c, C, here)
        x5 = channel(x, pixel, c + 1, C, here)
        x6 = channel(x, pixel, c + 2, C, here)
        x7 = channel(x, pixel, c + 3, C, here)
        x8 = channel(x, pixel, c + 4, C, here)
        inner = x3 * x3 + x4 * x4 + x5 * x5
        s2 = 1.0 + ALPHA * (x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4)
        s3 = 1.0 + ALPHA * (x1 * x1 + x2 * x2 + inner)
        s4 = 1.0 + ALPHA * (x2 * x2 + inner + x6 * x6)
        s5 = 1.0 + ALPHA * (inner + x6 * x6 + x7 * x7)
        s6 = 1.0 + ALPHA * (x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7 + x8 * x8)
        g4 = channel(dy, dy_pixel, c, C, here)
        own = power(s4, -BETA - 1.0)
        total = g4 * x4 * own
        total += channel(dy, dy_pixel, c - 2, C, here) * x2 * power(s2, -BETA - 1.0)
        total += channel(dy, dy_pixel, c - 1, C, here) * x3 * power(s3, -BETA - 1.0)
        total += channel(dy, dy_pixel, c + 1, C, here) * x5 * power(s5, -BETA - 1.0)
        total += channel(dy, dy_pixel, c + 2, C, here) * x6 * power(s6, -BETA - 1.0)
        value = g4 * own * s4 - (2.0 * ALPHA * BETA) * x4 * total
        tl.store(dx + p.to(tl.int64)[:, None] * C + c, value.to(dx.dtype.element_ty), mask=here & (c < C))


_respond, _respond_back = Kernel(respond), Kernel(respond_back)


def response_norm(x: Tensor, alpha: float, beta: float) -> Tensor:
    """x / (1 + alpha · Σ x²)^beta for a channels-last map (N, C, H, W), the sum over 5 adjacent channels."""
    return _ResponseNorm.apply(x, alpha, beta)


class _ResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, beta: float) -> Tensor:
        x, pixels = as_rows(x)
        N, C, H, W = x.shape
        y = torch.empty((N, C, H, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        P, vec = N * H * W, vector(C, pixels)
        with on(x.device):
            k = cut(P, C, tiling.NEIGHBORS, x.device)
            constants = (alpha, beta, k.pixels, k.channels, vec)
            same = key(x.device, (x, y), k.warps, *constants)
            _respond(same, k.grid, k.warps, 1, x, y, P, C // vec, pixels // vec, k.splits, *constants)
        ctx.save_for_backward(x)
        ctx.constants = alpha, beta
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for: the same from torch's own parts
            alpha, beta = ctx.constants
            return (
                torch.autograd.grad(F.local_response_norm(x, 5, 5 * alpha, beta, 1.0), x, dy, create_graph=True)[0],
                None,
                None,
            )
        pixels = as_rows(x)[1]
        dy, dy_pixels = as_rows(dy)
        N, C, H, W = x.shape
        dx = torch.empty((N, C, H, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        P, vec = N * H * W, vector(C, pixels, dy_pixels)
        with on(x.device):
            k = cut(P, C, tiling.NEIGHBORS, x.device)
            constants = (*ctx.constants, k.pixels, k.channels, vec)
            same = key(x.device, (dy, x, dx), k.warps, *constants)
            sizes = (P, C // vec, dy_pixels // vec, pixels // vec, k.splits)
            _respond_back(same, k.grid, k.warps, 1, dy, x, dx, *sizes, *constants)
        return dx, None, None
