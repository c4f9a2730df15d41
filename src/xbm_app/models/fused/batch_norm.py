# mypy: disable-error-code="no-untyped-def"
"""Training-mode batch normalization with its activation on channels-last maps, as one node of the autograd graph.

Forward: one pass computes the statistics, another normalizes, adds a residual map if there is one, and activates. Variances are
sums of squares about a shift, the mean of a program's first tile. The program that ends last merges the results of all, about a
shift again (Chan, Golub and LeVeque, 1983), always in the same order.

Backward: one pass computes the sums that all pixels of a channel share, another the gradient. With x̂ = (x − mean)/std and g the
incoming gradient where the activation passes it: ∂bias = Σ g, ∂weight = Σ g·x̂, ∂x = weight/std · (g − ∂bias/P − x̂·∂weight/P).
With a residual map, g is its gradient too; the first pass stores it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from xbm.kernels import Kernel, on_device_of
from xbm_app.models.fused import channels_last
from xbm_app.models.fused.channels_last import SIZES, as_rows, launch_key, pixel_stride, tile_map, vector_size

ACTIVATIONS = ("none", "relu", "relu6")  # the kernels know them by their index
NONE, RELU, RELU6 = (tl.constexpr(x) for x in range(3))
PASSES: dict[str, Callable[[Tensor], Tensor]] = {  # where an activation passes the gradient, by its input or output
    "none": torch.ones_like,
    "relu": lambda y: y > 0,
    "relu6": lambda y: (y > 0) & (y < 6),
}
MERGE_BLOCK = tl.constexpr(64)  # results of programs that are read at once


@triton.jit
def pixels_of_split(split, P, num_splits, BLOCK_P: tl.constexpr):
    """The number of pixels of a program: whole tiles, except for the program with the last tile."""
    num_tiles = tl.cdiv(P, BLOCK_P)
    pixels = (num_tiles - split + num_splits - 1) // num_splits * BLOCK_P
    return pixels - tl.where(split == (num_tiles - 1) % num_splits, num_tiles * BLOCK_P - P, 0)


@triton.jit
def normalized(x, mean, invstd, weight, bias):
    """Both directions must agree on this to the last bit, or the mask of the gradient would not be that of the output."""
    return (x - mean[None, :]) * (invstd * weight)[None, :] + bias[None, :]


@triton.jit
def load_channels(weight, bias, stats, offs_c, mask_c, C):
    """Mean, 1/std, weight and bias of a block of channels."""
    mean = tl.load(stats + offs_c, mask=mask_c, other=0.0)
    invstd = tl.load(stats + C + offs_c, mask=mask_c, other=0.0)
    w = tl.load(weight + offs_c, mask=mask_c, other=0.0)
    return mean, invstd, w, tl.load(bias + offs_c, mask=mask_c, other=0.0)


@triton.jit
def clamp_to_zero(x):
    """max(x, 0), where NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def merge_statistics(partials, offs_c, mask_c, C, P, num_splits, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """The mean over all programs, and the sum of squared deviations from it."""
    origin = tl.load(partials + offs_c, mask=mask_c, other=0.0, cache_modifier=".cg")
    sums = tl.zeros((MERGE_BLOCK, BLOCK_C), tl.float32)
    squares = tl.zeros((MERGE_BLOCK, BLOCK_C), tl.float32)
    for start in range(0, num_splits, MERGE_BLOCK):
        offs_s = start + tl.arange(0, MERGE_BLOCK)
        mask = (offs_s < num_splits)[:, None] & mask_c[None, :]
        offs = offs_s[:, None] * C + offs_c[None, :]
        d = tl.load(partials + offs, mask=mask, other=0.0, cache_modifier=".cg")
        d = tl.where(mask, d - origin[None, :], 0.0)
        n = pixels_of_split(offs_s, P, num_splits, BLOCK_P).to(tl.float32)[:, None]
        sums += n * d
        squares += n * d * d + tl.load(partials + num_splits * C + offs, mask=mask, other=0.0, cache_modifier=".cg")
    total = P.to(tl.float32)
    offset = tl.sum(sums, 0) / total
    return origin + offset, clamp_to_zero(tl.sum(squares, 0) - total * offset * offset)


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(
    x,  # (P, C), pixels `stride` apart; strides and `units` count groups of VEC channels
    partials,  # out, (2, num_splits, C): means and sums of squared deviations
    tickets,  # (blocks,) zeros: how many programs of a block of channels are done
    stats,  # out, (2, C): mean, 1/√(variance + eps)
    running_mean, running_var, num_batches,  # updated in place
    P, units, stride, num_splits, momentum, eps,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    pid_c = tl.program_id(0)
    split = tl.program_id(1)
    C = units * VEC
    offs_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs = tl.arange(0, BLOCK_P)
    first = split * BLOCK_P
    mask = (first + offs < P)[:, None] & mask_c[None, :]
    first_p = (first + offs).to(tl.int64)[:, None]
    v = tl.load(x + first_p * (stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
    shift = tl.sum(v, 0) / tl.minimum(P - first, BLOCK_P).to(tl.float32)
    sums = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(first, P, num_splits * BLOCK_P):
        offs_p = start + offs
        mask = (offs_p < P)[:, None] & mask_c[None, :]
        v = tl.load(x + offs_p.to(tl.int64)[:, None] * (stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - shift[None, :], 0.0)
        sums += d
        squares += d * d
    n = pixels_of_split(split, P, num_splits, BLOCK_P).to(tl.float32)
    offset = tl.sum(sums, 0) / n
    deviations = clamp_to_zero(tl.sum(squares, 0) - n * offset * offset)
    tl.store(partials + split * C + offs_c, shift + offset, mask=mask_c)
    tl.store(partials + (num_splits + split) * C + offs_c, deviations, mask=mask_c)

    tl.debug_barrier()
    if tl.atomic_add(tickets + pid_c, 1, sem="acq_rel") == num_splits - 1:
        mean, deviations = merge_statistics(partials, offs_c, mask_c, C, P, num_splits, BLOCK_P, BLOCK_C)
        tl.store(stats + offs_c, mean, mask=mask_c)
        tl.store(stats + C + offs_c, 1.0 / tl.sqrt_rn(deviations / P + eps), mask=mask_c)
        old = tl.load(running_mean + offs_c, mask=mask_c, other=0.0)
        tl.store(running_mean + offs_c, (1.0 - momentum) * old + momentum * mean, mask=mask_c)
        old = tl.load(running_var + offs_c, mask=mask_c, other=0.0)
        tl.store(running_var + offs_c, (1.0 - momentum) * old + momentum * (deviations / (P - 1)), mask=mask_c)
        if pid_c == 0:
            tl.store(num_batches, tl.load(num_batches) + 1)
        tl.store(tickets + pid_c, 0)


@triton.jit(do_not_specialize=SIZES)
def normalize_kernel(
    x, y, residual, weight, bias, stats, P, units, stride, residual_stride, num_splits,
    ACT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mean, invstd, w, b = load_channels(weight, bias, stats, offs_c, mask_c, C)
    last = (tl.cdiv(P, BLOCK_P) - 1) * BLOCK_P
    for done in range(tl.program_id(1) * BLOCK_P, last + BLOCK_P, num_splits * BLOCK_P):
        offs_p = last - done + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_c[None, :]
        v = tl.load(x + offs_p.to(tl.int64)[:, None] * (stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        v = normalized(v, mean, invstd, w, b)
        if residual is not None:
            offs = offs_p.to(tl.int64)[:, None] * (residual_stride * VEC) + offs_c[None, :]
            v += tl.load(residual + offs, mask=mask, other=0.0).to(tl.float32)
        if ACT != NONE:
            v = clamp_to_zero(v)
        if ACT == RELU6:
            v = tl.where(v > 6.0, 6.0, v)
        tl.store(y + offs_p.to(tl.int64)[:, None] * C + offs_c[None, :], v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def mask_gradient(g, y, ACT: tl.constexpr):
    """The gradient where the activation, whose output was y, passes it."""
    y = y.to(tl.float32)
    g = tl.where(y <= 0.0, 0.0, g)
    if ACT == RELU6:
        g = tl.where(y >= 6.0, 0.0, g)
    return g


@triton.jit
def activation_gradient(dy, x, mean, invstd, weight, bias, ACT: tl.constexpr, TYPE: tl.constexpr):
    """The gradient before the activation. The output is recomputed, and rounded as it was when stored."""
    g = dy
    if ACT != NONE:
        g = mask_gradient(g, normalized(x, mean, invstd, weight, bias).to(TYPE), ACT)
    return g


@triton.jit
def merge_sums(partials, offs_c, mask_c, C, num_splits, BLOCK_C: tl.constexpr):
    """The sums over all programs, always in the same order."""
    sums = tl.zeros((MERGE_BLOCK, BLOCK_C), tl.float32)
    for start in range(0, num_splits, MERGE_BLOCK):
        offs_s = start + tl.arange(0, MERGE_BLOCK)
        mask = (offs_s < num_splits)[:, None] & mask_c[None, :]
        sums += tl.load(partials + offs_s[:, None] * C + offs_c[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=SIZES)
def parameter_gradient_kernel(
    dy, x, weight, bias, stats,
    y,  # the output if there was a residual map, else None
    dresidual,  # out, (P, C), or None
    partials,  # out, (2, num_splits, C): Σ g·x̂ and Σ g over a program's pixels
    tickets,  # (blocks,) zeros: how many programs of a block of channels are done
    dweight, dbias,  # out, (C,)
    P, units, stride, dy_stride, num_splits,
    ACT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    pid_c = tl.program_id(0)
    split = tl.program_id(1)
    C = units * VEC
    offs_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mean, invstd, w, b = load_channels(weight, bias, stats, offs_c, mask_c, C)
    sums = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    products = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(split * BLOCK_P, P, num_splits * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_c[None, :]
        offs_p = offs_p.to(tl.int64)[:, None]
        v = tl.load(x + offs_p * (stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + offs_p * (dy_stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        if y is None:
            g = activation_gradient(g, v, mean, invstd, w, b, ACT, x.dtype.element_ty)
        else:
            offs = offs_p * C + offs_c[None, :]
            if ACT != NONE:
                g = mask_gradient(g, tl.load(y + offs, mask=mask, other=0.0), ACT)
            tl.store(dresidual + offs, g.to(dresidual.dtype.element_ty), mask=mask)
        sums += g
        products += g * (v - mean[None, :])
    tl.store(partials + split * C + offs_c, tl.sum(products, 0) * invstd, mask=mask_c)
    tl.store(partials + (num_splits + split) * C + offs_c, tl.sum(sums, 0), mask=mask_c)

    tl.debug_barrier()
    if tl.atomic_add(tickets + pid_c, 1, sem="acq_rel") == num_splits - 1:
        tl.store(dweight + offs_c, merge_sums(partials, offs_c, mask_c, C, num_splits, BLOCK_C), mask=mask_c)
        tl.store(dbias + offs_c, merge_sums(partials + num_splits * C, offs_c, mask_c, C, num_splits, BLOCK_C), mask=mask_c)
        tl.store(tickets + pid_c, 0)


@triton.jit(do_not_specialize=SIZES)
def input_gradient_kernel(
    dy, x, dx, weight, bias, stats, dweight, dbias, P, units, stride, dy_stride, num_splits,
    ACT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    C = units * VEC
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mean, invstd, w, b = load_channels(weight, bias, stats, offs_c, mask_c, C)
    n = P.to(tl.float32)
    mean_g = (tl.load(dbias + offs_c, mask=mask_c, other=0.0) / n)[None, :]
    slope = (tl.load(dweight + offs_c, mask=mask_c, other=0.0) / n * invstd)[None, :]
    scale = (invstd * w)[None, :]
    last = (tl.cdiv(P, BLOCK_P) - 1) * BLOCK_P
    for done in range(tl.program_id(1) * BLOCK_P, last + BLOCK_P, num_splits * BLOCK_P):
        offs_p = last - done + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_c[None, :]
        offs_p = offs_p.to(tl.int64)[:, None]
        v = tl.load(x + offs_p * (stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + offs_p * (dy_stride * VEC) + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = activation_gradient(g, v, mean, invstd, w, b, ACT, x.dtype.element_ty)
        g = scale * (g - mean_g - (v - mean[None, :]) * slope)
        tl.store(dx + offs_p * C + offs_c[None, :], g.to(dx.dtype.element_ty), mask=mask)


_statistics, _normalize = Kernel(statistics_kernel), Kernel(normalize_kernel)
_parameter_gradient, _input_gradient = Kernel(parameter_gradient_kernel), Kernel(input_gradient_kernel)


@on_device_of(0)
def forward(
    x: Tensor, stride: int, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, num_batches: Tensor,
    tickets: Tensor, momentum: float, eps: float, act: int, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, channels-last, and (2, C): mean and 1/√(variance + eps). Updates the running statistics."""
    C, P = x.shape[1], x.numel() // x.shape[1]
    residual, residual_stride = (None, C) if residual is None else as_rows(residual)
    vec = vector_size(C, stride, residual_stride)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    stats = torch.empty((2, C), dtype=torch.float32, device=x.device)
    t = tile_map(P, C, channels_last.REDUCTION, x.device)
    partials = torch.empty((2, t.splits, C), dtype=torch.float32, device=x.device)
    tensors: tuple[Tensor | None, ...] = (x, partials, tickets, stats, running_mean, running_var, num_batches)
    constants: tuple[int, ...] = (t.pixels, t.channels, vec)
    sizes = (P, C // vec, stride // vec)
    key = launch_key(x.device, tensors, t.warps, *constants)
    _statistics(key, t.grid, t.warps, 1, *tensors, *sizes, t.splits, float(momentum), float(eps), *constants)
    t = tile_map(P, C, channels_last.ELEMENTWISE, x.device)
    tensors = (x, y, residual, weight, bias, stats)
    constants = (act, t.pixels, t.channels, vec)
    key = launch_key(x.device, tensors, t.warps, *constants)
    _normalize(key, t.grid, t.warps, 1, *tensors, *sizes, residual_stride // vec, t.splits, *constants)
    torch.autograd.graph.increment_version((running_mean, running_var, num_batches))
    return y, stats


@on_device_of(1)
def backward(
    dy: Tensor, x: Tensor, stride: int, weight: Tensor, bias: Tensor, stats: Tensor, tickets: Tensor, act: int,
    needs_dx: bool, y: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of x (channels-last, or None), weight, bias and residual map. `y`: the output if there was such a map."""
    dy, dy_stride = as_rows(dy)
    C, P = x.shape[1], x.numel() // x.shape[1]
    vec = vector_size(C, stride, dy_stride)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    dresidual = None if y is None else torch.empty_like(y)
    sizes = (P, C // vec, stride // vec, dy_stride // vec)
    t = tile_map(P, C, channels_last.REDUCTION, x.device)
    partials = torch.empty((2, t.splits, C), dtype=torch.float32, device=x.device)
    tensors: tuple[Tensor | None, ...] = (dy, x, weight, bias, stats, y, dresidual, partials, tickets, dweight, dbias)
    constants = (act, t.pixels, t.channels, vec)
    key = launch_key(x.device, tensors, t.warps, *constants)
    _parameter_gradient(key, t.grid, t.warps, 1, *tensors, *sizes, t.splits, *constants)
    if not needs_dx:
        return None, dweight, dbias, dresidual
    if dresidual is not None:  # already masked
        dy, act, sizes = dresidual, NONE.value, (*sizes[:3], C // vec)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    t = tile_map(P, C, channels_last.ELEMENTWISE, x.device)
    tensors = (dy, x, dx, weight, bias, stats, dweight, dbias)
    constants = (act, t.pixels, t.channels, vec)
    key = launch_key(x.device, tensors, t.warps, *constants)
    _input_gradient(key, t.grid, t.warps, 1, *tensors, *sizes, t.splits, *constants)
    return dx, dweight, dbias, dresidual


class BatchNormAct(torch.autograd.Function):
    """activation(batch_norm(x) + residual), of x's type. Updates the running statistics and `num_batches` as torch does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, C, H, W), channels-last
        weight: Tensor, bias: Tensor,
        residual: Tensor | None,  # like x
        running_mean: Tensor, running_var: Tensor,
        num_batches: Tensor,  # (), int64
        tickets: Tensor,  # int32 zeros, one per block of channels, and zeros again afterwards
        momentum: float, eps: float, activation: str,
    ) -> Tensor:  # fmt: skip
        ctx.stride, act, running = pixel_stride(x), ACTIVATIONS.index(activation), (running_mean, running_var, num_batches)
        y, stats = forward(x, ctx.stride, weight, bias, *running, tickets, momentum, eps, act, residual)
        ctx.save_for_backward(x, weight, bias, stats, None if residual is None else y)
        ctx.tickets, ctx.eps, ctx.activation = tickets, eps, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, y = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled():
            act = ACTIVATIONS.index(ctx.activation)
            return *backward(dy, x, ctx.stride, weight, bias, stats, ctx.tickets, act, needed[0], y), *(None,) * 7
        # a second derivative will be asked for: torch's own formula has one
        plain = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
        dy = dy * PASSES[ctx.activation](plain if y is None else y)
        inputs = [t for t, needs in zip((x, weight, bias), needed) if needs]
        gradients = iter(torch.autograd.grad(plain, inputs, dy, create_graph=True) if inputs else ())
        return *(next(gradients) if needs else None for needs in needed), dy if y is not None else None, *(None,) * 7
