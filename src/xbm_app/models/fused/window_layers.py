# mypy: disable-error-code="no-untyped-def"
"""Layers on channels-last maps that look at the neighbors of a value: max-pooling at pixels, local response normalization at
channels.

Max-pooling keeps the position of each maximum in its window in one byte, and gathers the gradient of an input pixel from the
windows over it, so nothing is zeroed or accumulated in memory. Local response normalization takes one pass in each direction.
Its backward pass recomputes the scale, which costs less than writing it in float32 and reading it back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from xbm.kernels import Kernel, on_device_of
from xbm_app.models.fused import channels_last
from xbm_app.models.fused.channels_last import SIZES, as_rows, launch_key, tile_map, vector_size

# ------------------------------------------------------------------ max-pooling


@triton.jit(do_not_specialize=SIZES)
def max_pool_kernel(
    x, y,
    positions,  # out: kh·K + kw
    P, units, stride, num_splits, H, W, OH, OW,  # P: pixels of the output
    K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    offs_c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    for start in range(tl.program_id(1) * BLOCK_P, P, num_splits * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        row = offs_p // OW
        h = row % OH * S - PAD  # the top left of the window, perhaps outside the map
        w = offs_p % OW * S - PAD
        image = (row // OH).to(tl.int64) * H
        best = tl.full((BLOCK_P, BLOCK_C), float("-inf"), tl.float32)
        first = tl.maximum(-h, 0) * K + tl.maximum(-w, 0)  # the first position inside, if everything is -inf
        position = first[:, None] + tl.zeros((BLOCK_P, BLOCK_C), tl.int32)
        for k in tl.static_range(K * K):
            ih = h + k // K
            iw = w + k % K
            mask_p = (offs_p < P) & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            offs = ((image + ih) * W + iw)[:, None] * (stride * VEC) + offs_c
            v = tl.load(x + offs, mask=mask_p[:, None] & (offs_c < C), other=float("-inf")).to(tl.float32)
            better = (v > best) | (v != v)
            best = tl.where(better, v, best)
            position = tl.where(better, k, position)
        offs = offs_p.to(tl.int64)[:, None] * C + offs_c
        mask = (offs_p < P)[:, None] & (offs_c < C)
        tl.store(y + offs, best.to(y.dtype.element_ty), mask=mask)
        tl.store(positions + offs, position.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def max_pool_gradient_kernel(
    dy, positions, dx,
    P, units, dy_stride, num_splits, H, W, OH, OW,  # P: pixels of the input
    K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    offs_c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    WINDOWS: tl.constexpr = (K + S - 1) // S  # over a pixel, in each direction
    for start in range(tl.program_id(1) * BLOCK_P, P, num_splits * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        row = offs_p // W
        h = row % H + PAD
        w = offs_p % W + PAD
        image = (row // H).to(tl.int64) * OH
        acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        for k in tl.static_range(WINDOWS * WINDOWS):
            oh = h // S - k // WINDOWS
            ow = w // S - k % WINDOWS
            kh = h - oh * S
            kw = w - ow * S
            mask_p = (offs_p < P) & (oh >= 0) & (oh < OH) & (kh < K) & (ow >= 0) & (ow < OW) & (kw < K)
            mask = mask_p[:, None] & (offs_c < C)
            pixel = ((image + oh) * OW + ow)[:, None]
            position = tl.load(positions + pixel * C + offs_c, mask=mask, other=255).to(tl.int32)
            g = tl.load(dy + pixel * (dy_stride * VEC) + offs_c, mask=mask, other=0.0).to(tl.float32)
            acc += tl.where(position == (kh * K + kw)[:, None], g, 0.0)
        mask = (offs_p < P)[:, None] & (offs_c < C)
        tl.store(dx + offs_p.to(tl.int64)[:, None] * C + offs_c, acc.to(dx.dtype.element_ty), mask=mask)


_max_pool, _max_pool_gradient = Kernel(max_pool_kernel), Kernel(max_pool_gradient_kernel)


def pooled_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """As torch defines it: a last window that exceeds the map counts if it starts inside the map or its left padding."""
    windows = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def scatter_gradient(dy: Tensor, positions: Tensor, H: int, W: int, kernel: int, stride: int, padding: int) -> Tensor:
    """What `max_pool_gradient_kernel` computes, differentiable."""
    h, w = (torch.arange(size, device=dy.device) * stride - padding for size in dy.shape[2:])
    pixels = (h[:, None] + positions // kernel) * W + w + positions % kernel  # (N, C, OH, OW)
    return dy.new_zeros((*dy.shape[:2], H * W)).scatter_add(2, pixels.flatten(2), dy.flatten(2)).unflatten(2, (H, W))


@on_device_of(1)
def _launch_pool(
    kernel: Kernel, source: Tensor, tensors: tuple[Tensor, ...], P: int, stride: int, sides: tuple[int, ...],
    window: tuple[int, int, int],
) -> None:  # fmt: skip
    """One tile of P pixels × C channels after the other; `stride` and C are those of the map that is read."""
    C = source.shape[1]
    vec = vector_size(C, stride)
    t = tile_map(P, C, channels_last.ELEMENTWISE, source.device)
    constants = (*window, t.pixels, t.channels, vec)
    key = launch_key(source.device, tensors, t.warps, *constants)
    kernel(key, t.grid, t.warps, 1, *tensors, P, C // vec, stride // vec, t.splits, *sides, *constants)


def max_pool(x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Tensor:
    """F.max_pool2d for a channels-last map (N, C, H, W)."""
    return _MaxPool.apply(x, kernel, stride, padding, ceil_mode)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Tensor:
        x, pixel_stride = as_rows(x)
        N, C, H, W = x.shape
        OH, OW = (pooled_size(size, kernel, stride, padding, ceil_mode) for size in (H, W))
        y, positions = (
            torch.empty((N, C, OH, OW), dtype=dtype, device=x.device, memory_format=torch.channels_last)
            for dtype in (x.dtype, torch.uint8)
        )
        ctx.save_for_backward(positions)
        ctx.shape, ctx.window = x.shape, (kernel, stride, padding)
        _launch_pool(_max_pool, x, (x, y, positions), N * OH * OW, pixel_stride, (H, W, OH, OW), ctx.window)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (positions,), (N, C, H, W), (OH, OW) = ctx.saved_tensors, ctx.shape, dy.shape[2:]
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return scatter_gradient(dy, positions, H, W, *ctx.window), None, None, None, None
        dy, pixel_stride = as_rows(dy)
        dx = torch.empty((N, C, H, W), dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        _launch_pool(_max_pool_gradient, dy, (dy, positions, dx), N * H * W, pixel_stride, (H, W, OH, OW), ctx.window)
        return dx, None, None, None, None


# ------------------------------------------------------------------ local response normalization


@triton.jit
def load_channels(x, offs_pixel, offs_c, C, mask_p):
    """Channels `offs_c` of some pixels; 0 before the first and after the last."""
    return tl.load(x + offs_pixel + offs_c, mask=mask_p & (offs_c >= 0) & (offs_c < C), other=0.0).to(tl.float32)


@triton.jit
def power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@triton.jit(do_not_specialize=SIZES)
def response_norm_kernel(
    x, y, P, units, stride, num_splits, ALPHA: tl.constexpr, BETA: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """y = x · (1 + ALPHA · Σ x²)^−BETA, with the sum over 5 adjacent channels."""
    C = units * VEC
    offs_c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    for start in range(tl.program_id(1) * BLOCK_P, P, num_splits * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask_p = (offs_p < P)[:, None]
        offs = offs_p.to(tl.int64)[:, None] * (stride * VEC)
        own = load_channels(x, offs, offs_c, C, mask_p)
        total = own * own
        for k in tl.static_range(1, 3):
            below = load_channels(x, offs, offs_c - k, C, mask_p)
            above = load_channels(x, offs, offs_c + k, C, mask_p)
            total += below * below + above * above
        value = own * power(1.0 + ALPHA * total, -BETA)
        tl.store(y + offs_p.to(tl.int64)[:, None] * C + offs_c, value.to(y.dtype.element_ty), mask=mask_p & (offs_c < C))


@triton.jit(do_not_specialize=SIZES)
def response_norm_gradient_kernel(
    dy, x, dx, P, units, dy_stride, stride, num_splits, ALPHA: tl.constexpr, BETA: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """dx = dy · s^−BETA − 2 · ALPHA · BETA · x · Σ dy · x · s^(−BETA − 1), with s the scale of each of 5 adjacent channels."""
    C = units * VEC
    offs_c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    for start in range(tl.program_id(1) * BLOCK_P, P, num_splits * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask_p = (offs_p < P)[:, None]
        offs = offs_p.to(tl.int64)[:, None] * (stride * VEC)
        dy_offs = offs_p.to(tl.int64)[:, None] * (dy_stride * VEC)
        x0 = load_channels(x, offs, offs_c - 4, C, mask_p)  # x4 is the channel itself
        x1 = load_channels(x, offs, offs_c - 3, C, mask_p)
        x2 = load_channels(x, offs, offs_c - 2, C, mask_p)
        x3 = load_channels(x, offs, offs_c - 1, C, mask_p)
        x4 = load_channels(x, offs, offs_c, C, mask_p)
        x5 = load_channels(x, offs, offs_c + 1, C, mask_p)
        x6 = load_channels(x, offs, offs_c + 2, C, mask_p)
        x7 = load_channels(x, offs, offs_c + 3, C, mask_p)
        x8 = load_channels(x, offs, offs_c + 4, C, mask_p)
        inner = x3 * x3 + x4 * x4 + x5 * x5
        s2 = 1.0 + ALPHA * (x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4)
        s3 = 1.0 + ALPHA * (x1 * x1 + x2 * x2 + inner)
        s4 = 1.0 + ALPHA * (x2 * x2 + inner + x6 * x6)
        s5 = 1.0 + ALPHA * (inner + x6 * x6 + x7 * x7)
        s6 = 1.0 + ALPHA * (x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7 + x8 * x8)
        g4 = load_channels(dy, dy_offs, offs_c, C, mask_p)
        own = power(s4, -BETA - 1.0)
        total = g4 * x4 * own
        total += load_channels(dy, dy_offs, offs_c - 2, C, mask_p) * x2 * power(s2, -BETA - 1.0)
        total += load_channels(dy, dy_offs, offs_c - 1, C, mask_p) * x3 * power(s3, -BETA - 1.0)
        total += load_channels(dy, dy_offs, offs_c + 1, C, mask_p) * x5 * power(s5, -BETA - 1.0)
        total += load_channels(dy, dy_offs, offs_c + 2, C, mask_p) * x6 * power(s6, -BETA - 1.0)
        value = g4 * own * s4 - (2.0 * ALPHA * BETA) * x4 * total
        tl.store(dx + offs_p.to(tl.int64)[:, None] * C + offs_c, value.to(dx.dtype.element_ty), mask=mask_p & (offs_c < C))


_response_norm, _response_norm_gradient = Kernel(response_norm_kernel), Kernel(response_norm_gradient_kernel)


@on_device_of(1)
def _launch_norm(kernel: Kernel, x: Tensor, tensors: tuple[Tensor, ...], strides: tuple[int, ...], exponents: tuple) -> None:
    """One tile of pixels × channels after the other; `strides` are those of the maps that are read."""
    N, C, H, W = x.shape
    vec = vector_size(C, *strides)
    t = tile_map(N * H * W, C, channels_last.NEIGHBORHOOD, x.device)
    constants = (*exponents, t.pixels, t.channels, vec)
    key = launch_key(x.device, tensors, t.warps, *constants)
    sizes = (N * H * W, C // vec, *(stride // vec for stride in strides), t.splits)
    kernel(key, t.grid, t.warps, 1, *tensors, *sizes, *constants)


def response_norm(x: Tensor, alpha: float, beta: float) -> Tensor:
    """x / (1 + alpha · Σ x²)^beta for a channels-last map (N, C, H, W), the sum over 5 adjacent channels."""
    return _ResponseNorm.apply(x, alpha, beta)


class _ResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, beta: float) -> Tensor:
        x, stride = as_rows(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        ctx.save_for_backward(x)
        ctx.constants = alpha, beta
        _launch_norm(_response_norm, x, (x, y), (stride,), ctx.constants)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            alpha, beta = ctx.constants
            y = F.local_response_norm(x, 5, 5 * alpha, beta, 1.0)
            return torch.autograd.grad(y, x, dy, create_graph=True)[0], None, None
        dy, dy_stride = as_rows(dy)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _launch_norm(_response_norm_gradient, x, (dy, x, dx), (dy_stride, as_rows(x)[1]), ctx.constants)
        return dx, None, None
