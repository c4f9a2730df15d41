# mypy: disable-error-code="no-untyped-def"
"""Max-pooling, channels-last: which place of its window each maximum came from is kept in a byte, and the gradient of
an input pixel is gathered from the windows that hold it, so nothing is zeroed or added up in memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xbm.kernels import Kernel
from xbm_app.models.fused import tiling
from xbm_app.models.fused.layout import as_rows, vector
from xbm_app.models.fused.tiling import SIZES, cut, key, on


@triton.jit(do_not_specialize=SIZES)
def pool(
    x, y, places, P, units, stride, splits, H, W, OH, OW,
    K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """P: pixels of the output. places: out, kh·K + kw."""
    C = units * VEC
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    for start in range(tl.program_id(1) * BP, P, splits * BP):
        p = start + tl.arange(0, BP)
        row = p // OW
        h = row % OH * S - PAD  # the window's first, perhaps outside
        w = p % OW * S - PAD
        image = (row // OH).to(tl.int64) * H
        best = tl.full((BP, BC), float("-inf"), tl.float32)
        first = tl.maximum(-h, 0) * K + tl.maximum(-w, 0)  # where even −inf comes from, if there is nothing else
        place = first[:, None] + tl.zeros((BP, BC), tl.int32)
        for k in tl.static_range(K * K):
            ih = h + k // K
            iw = w + k % K
            here = (p < P) & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((image + ih) * W + iw)[:, None] * (stride * VEC) + c
            v = tl.load(x + at, mask=here[:, None] & (c < C), other=float("-inf")).to(tl.float32)
            better = (v > best) | (v != v)
            best = tl.where(better, v, best)
            place = tl.where(better, k, place)
        at = p.to(tl.int64)[:, None] * C + c
        here = (p < P)[:, None] & (c < C)
        tl.store(y + at, best.to(y.dtype.element_ty), mask=here)
        tl.store(places + at, place.to(tl.uint8), mask=here)


@triton.jit(do_not_specialize=SIZES)
def gather(
    dy, places, dx, P, units, dy_stride, splits, H, W, OH, OW,
    K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """P: pixels of the input."""
    C = units * VEC
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    EACH_WAY: tl.constexpr = (K + S - 1) // S  # windows over a pixel
    for start in range(tl.program_id(1) * BP, P, splits * BP):
        p = start + tl.arange(0, BP)
        row = p // W
        h = row % H + PAD
        w = p % W + PAD
        image = (row // H).to(tl.int64) * OH
        g = tl.zeros((BP, BC), tl.float32)
        for k in tl.static_range(EACH_WAY * EACH_WAY):
            oh = h // S - k // EACH_WAY
            ow = w // S - k % EACH_WAY
            kh = h - oh * S
            kw = w - ow * S
            here = (p < P) & (oh >= 0) & (oh < OH) & (kh < K) & (ow >= 0) & (ow < OW) & (kw < K)
            which = here[:, None] & (c < C)
            pixel = ((image + oh) * OW + ow)[:, None]
            place = tl.load(places + pixel * C + c, mask=which, other=255).to(tl.int32)
            v = tl.load(dy + pixel * (dy_stride * VEC) + c, mask=which, other=0.0).to(tl.float32)
            g += tl.where(place == (kh * K + kw)[:, None], v, 0.0)
        tl.store(dx + p.to(tl.int64)[:, None] * C + c, g.to(dx.dtype.element_ty), mask=(p < P)[:, None] & (c < C))


_pool, _gather = Kernel(pool), Kernel(gather)


def pooled_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """As torch defines it: a last window that hangs over counts if it starts inside the map or its left padding."""
    many = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    return many - 1 if ceil_mode and (many - 1) * stride >= size + padding else many


def scatter(dy: Tensor, places: Tensor, H: int, W: int, kernel: int, stride: int, padding: int) -> Tensor:
    """What `gather` gives, differentiable."""
    h, w = (torch.arange(size, device=dy.device) * stride - padding for size in dy.shape[2:])
    pixels = (h[:, None] + places // kernel) * W + w + places % kernel  # (N, C, OH, OW)
    return dy.new_zeros((*dy.shape[:2], H * W)).scatter_add(2, pixels.flatten(2), dy.flatten(2)).unflatten(2, (H, W))


def max_pool(x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Tensor:
    """F.max_pool2d for a channels-last map (N, C, H, W)."""
    return _MaxPool.apply(x, kernel, stride, padding, ceil_mode)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Tensor:
        x, pixels = as_rows(x)
        N, C, H, W = x.shape
        OH, OW = (pooled_size(size, kernel, stride, padding, ceil_mode) for size in (H, W))
        y = torch.empty((N, C, OH, OW), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = torch.empty((N, C, OH, OW), dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
        P, vec = N * OH * OW, vector(C, pixels)
        with on(x.device):
            k = cut(P, C, tiling.POOL, x.device)
            constants = (kernel, stride, padding, k.pixels, k.channels, vec)
            same = key(x.device, (x, y, places), k.warps, *constants)
            sizes = (P, C // vec, pixels // vec, k.splits, H, W, OH, OW)
            _pool(same, k.grid, k.warps, 1, x, y, places, *sizes, *constants)
        ctx.save_for_backward(places)
        ctx.shape, ctx.window = x.shape, (kernel, stride, padding)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (places,), (N, C, H, W), (OH, OW) = ctx.saved_tensors, ctx.shape, dy.shape[2:]
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for: the same from torch's own parts
            return scatter(dy, places, H, W, *ctx.window), None, None, None, None
        dy, pixels = as_rows(dy)
        dx = torch.empty((N, C, H, W), dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        P, vec = N * H * W, vector(C, pixels)
        with on(dy.device):
            k = cut(P, C, tiling.POOL, dy.device)
            constants = (*ctx.window, k.pixels, k.channels, vec)
            same = key(dy.device, (dy, places, dx), k.warps, *constants)
            sizes = (P, C // vec, pixels // vec, k.splits, H, W, OH, OW)
            _gather(same, k.grid, k.warps, 1, dy, places, dx, *sizes, *constants)
        return dx, None, None, None, None
