"""Batch norm with the statistics of the global batch, over all ranks, on any device.

With separate statistics per rank, a global batch of 32 glyphs on two ranks lost four points of R@1: each rank sees 16 images of
four classes. torch's SyncBatchNorm does not run on a CPU, where several ranks must give the same result as one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm.distributed import Ranks

WITH_ACTIVATION = "timm.layers.norm_act.BatchNormAct2d"


def synchronise(model: nn.Module, ranks: Ranks) -> None:
    """Makes the batch norm of a model use the statistics of all ranks in training; names and weights do not change.

    Supports torch's BatchNorm1d, 2d and 3d and timm's BatchNormAct2d. All ranks must run the model equally often.
    """
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = _Synchronised
        elif f"{type(module).__module__}.{type(module).__qualname__}" == WITH_ACTIVATION:
            module.__class__ = _SynchronisedAct
        if isinstance(module, _Synchronised):
            module.ranks = ranks


class _Synchronised(nn.modules.batchnorm._BatchNorm):
    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.0, self.eps)
        y, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.ranks)
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return y


class _SynchronisedAct(_Synchronised):
    act: nn.Module
    drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class _Normalise(torch.autograd.Function):
    """Sums two values per channel over the ranks in the forward pass, and two in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks
    ) -> tuple[Tensor, ...]:
        dims = [0, *range(2, x.dim())]
        wide = x.double()
        count_here = torch.full((1,), float(x.numel() // x.shape[1]), dtype=torch.float64, device=x.device)
        sums = torch.cat(
            [wide.sum(dims), wide.square().sum(dims), count_here]
        )  # (2C + 1,), in double, since the squares cancel below
        total = ranks.sum(sums, "batch norm")
        count = total[-1]
        mean, square = (total[:-1] / count).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt()
        shape = [1, -1, *[1] * (x.dim() - 2)]
        hat = (x - mean.to(x.dtype).view(shape)) * scale.to(x.dtype).view(shape)
        y = hat if weight is None or bias is None else hat * weight.to(x.dtype).view(shape) + bias.to(x.dtype).view(shape)
        ctx.save_for_backward(hat, scale, weight, count)
        ctx.ranks, ctx.dims, ctx.shape = ranks, dims, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hat, scale, weight, count = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        grad_bias, grad_weight = upstream.sum(dims), (upstream * hat).sum(dims)
        total = ctx.ranks.sum(torch.cat([grad_bias, grad_weight]).double(), "batch norm") / count
        mean, along = (part.to(hat.dtype).view(shape) for part in total.chunk(2))
        factor = scale.to(hat.dtype) if weight is None else scale.to(hat.dtype) * weight.to(hat.dtype)
        grad_x = (upstream - mean - hat * along) * factor.view(shape)
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None, None
