"""The paper's Inception networks: GoogLeNet and BN-Inception.

GoogLeNet is as first published ("Going Deeper with Convolutions", Szegedy et al., 2015) and as BVLC trained it in Caffe.
BN-Inception, the paper's third trunk, is from "Batch Normalization" (Ioffe and Szegedy, 2015).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 1024  # of both
# Local response normalization, as in the published GoogLeNet.
NEIGHBORS, ALPHA, BETA = 5, 1e-4, 0.75
# One row per block: 1×1 │ 3×3 reduce, 3×3 │ 5×5 reduce, 5×5 │ projection of the pool. None halves the map.
BLOCKS: dict[str, tuple[int, ...] | None] = {
    "inception3a": (64, 96, 128, 16, 32, 32),
    "inception3b": (128, 128, 192, 32, 96, 64),
    "maxpool3": None,
    "inception4a": (192, 96, 208, 16, 48, 64),
    "inception4b": (160, 112, 224, 24, 64, 64),
    "inception4c": (128, 128, 256, 24, 64, 64),
    "inception4d": (112, 144, 288, 32, 64, 64),
    "inception4e": (256, 160, 320, 32, 128, 128),
    "maxpool4": None,
    "inception5a": (256, 160, 320, 32, 128, 128),
    "inception5b": (384, 192, 384, 48, 128, 128),
}


class GoogLeNet(nn.Module):
    """RGB images to a map of 1024 channels, 1/32 of the size.

    Unlike torchvision's port this network has no batch normalization, normalizes local responses, and has true 5×5
    convolutions. The tensors have torchvision's names (`conv1.weight`, `inception3a.branch2.1.bias`). The published weights
    expect blue, green, red, so the channels are reversed on the way in; without normalization layers that would undo a
    scale, the images must be in the units that the weights expect: pixels from 0 to 255, less a mean.

    Example:
        >>> GoogLeNet()(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 1024, 2, 2])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvReLU(3, 64, 7, stride=2)
        self.maxpool1 = halving_pool()
        self.norm1 = LocalResponseNorm()
        self.conv2 = ConvReLU(64, 64, 1)
        self.conv3 = ConvReLU(64, 192, 3)
        self.norm2 = LocalResponseNorm()
        self.maxpool2 = halving_pool()
        channels = 192
        for name, sizes in BLOCKS.items():
            self.add_module(name, halving_pool() if sizes is None else Inception(channels, *sizes))
            channels = channels if sizes is None else sizes[0] + sizes[2] + sizes[4] + sizes[5]

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm1(self.maxpool1(self.conv1(images.flip(1))))
        x = self.maxpool2(self.norm2(self.conv3(self.conv2(x))))
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
        return x


class ConvReLU(nn.Conv2d):
    """A convolution that keeps the size (at stride 1) and is followed by a ReLU."""

    def __init__(self, channels: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(channels, outputs, size, stride, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class Inception(nn.Module):
    """Four branches side by side: 1×1, 3×3, 5×5, and a 3×3 max-pool with a projection."""

    def __init__(
        self, channels: int, one: int, reduced_three: int, three: int, reduced_five: int, five: int, projection: int
    ) -> None:
        super().__init__()
        self.branch1 = ConvReLU(channels, one, 1)
        self.branch2 = nn.Sequential(ConvReLU(channels, reduced_three, 1), ConvReLU(reduced_three, three, 3))
        self.branch3 = nn.Sequential(ConvReLU(channels, reduced_five, 1), ConvReLU(reduced_five, five, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvReLU(channels, projection, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


def halving_pool() -> nn.MaxPool2d:
    """Max-pooling as Caffe rounds: the first window starts at the edge, the last one may extend beyond it."""
    return nn.MaxPool2d(3, 2, ceil_mode=True)


class LocalResponseNorm(nn.Module):
    """Local response normalization with the published constants."""

    def forward(self, x: Tensor) -> Tensor:
        return local_response_norm(x)


def local_response_norm(x: Tensor) -> Tensor:
    """x / (1 + α · mean of x² over 5 adjacent channels)^β; zeros count beyond the first and the last channel.

    Computed in float32 whatever the type of `x`, and returned in that type: under autocast torch's own function returns
    float32, and goes through the map three times more often in the backward pass.

    Args:
        x: (B, C, H, W), fastest where channels come last in memory.
    """
    return _LocalResponseNorm.apply(x)


class _LocalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.float()
        scale = _mean_of_neighbors(wide.square()).mul_(ALPHA).add_(1)
        ctx.save_for_backward(x, scale)
        return scale.pow(-BETA).mul_(wide).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """dx = g · s^−β − 2αβ · x · mean(g · x · s^(−β−1)), the mean over the channels whose scale `x` is part of."""
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for, and the steps below work in place
            y = F.local_response_norm(x, NEIGHBORS, ALPHA, BETA, 1.0)
            return torch.autograd.grad(y, x, gradient, create_graph=True)[0]
        direct = scale.pow(-BETA).mul_(gradient)
        through = _mean_of_neighbors((direct * x).div_(scale))
        return direct.addcmul_(through, x.float(), value=-2 * ALPHA * BETA).to(x.dtype)


def _mean_of_neighbors(x: Tensor) -> Tensor:
    """Mean over 5 adjacent channels, as average pooling along a row of channels: one pass where channels come last."""
    rows = x.permute(0, 2, 3, 1)
    pooled = F.avg_pool2d(rows.flatten(0, 1)[None], (1, NEIGHBORS), 1, (0, NEIGHBORS // 2))
    return pooled.view(rows.shape).permute(0, 3, 1, 2)


# ------------------------------------------------------------------ BN-Inception

# One row per block: 1×1 │ 3×3 reduce, 3×3 │ double 3×3 reduce, double 3×3 │ pool, its projection.
# A block without a 1×1 has stride 2 and no projection after its pooling.
BN_BLOCKS = {
    "3a": (64, 64, 64, 64, 96, "avg", 32),
    "3b": (64, 64, 96, 64, 96, "avg", 64),
    "3c": (0, 128, 160, 64, 96, "max", 0),
    "4a": (224, 64, 96, 96, 128, "avg", 128),
    "4b": (192, 96, 128, 96, 128, "avg", 128),
    "4c": (160, 128, 160, 128, 160, "avg", 128),
    "4d": (96, 128, 192, 160, 192, "avg", 128),
    "4e": (0, 128, 192, 192, 256, "max", 0),
    "5a": (352, 192, 320, 160, 224, "avg", 128),
    "5b": (352, 192, 320, 192, 224, "max", 128),
}


class BNInception(nn.Module):
    """Maps RGB images to 1024 channels at 1/32 of the size.

    The state dict is flat and named as in the common conversions from Caffe: `conv1_7x7_s2`, `conv2_3x3_reduce`,
    `conv2_3x3`, and for each block `inception_3a_` followed by `1x1`, `3x3_reduce`, `3x3`, `double_3x3_reduce`,
    `double_3x3_1`, `double_3x3_2` or `pool_proj`; the batch norm of a convolution has its name with `_bn` appended. Those
    weights were trained on blue, green, red, so the channels are reversed at the input.

    Example:
        >>> BNInception().eval()(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 1024, 2, 2])
    """

    # xbm_app.models.fused.fuse replaces these by kernels that compute the same.
    _norm_relu = staticmethod(lambda norm, x: F.relu(norm(x), inplace=True))
    _max_pool = staticmethod(F.max_pool2d)

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        channels = 192
        for name, (one, reduce, three, double_reduce, double, _, projection) in BN_BLOCKS.items():
            block, stride = f"inception_{name}_", 1 if one else 2
            if one:
                self._add(block + "1x1", channels, one, 1)
            self._add(block + "3x3_reduce", channels, reduce, 1)
            self._add(block + "3x3", reduce, three, 3, stride)
            self._add(block + "double_3x3_reduce", channels, double_reduce, 1)
            self._add(block + "double_3x3_1", double_reduce, double, 3)
            self._add(block + "double_3x3_2", double, double, 3, stride)
            if projection:
                self._add(block + "pool_proj", channels, projection, 1)
            channels = one + three + double + (projection or channels)

    def _add(self, name: str, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(inputs, outputs, size, stride, padding=size // 2))
        self.add_module(name + "_bn", nn.BatchNorm2d(outputs))

    def _conv(self, name: str, x: Tensor) -> Tensor:
        return self._norm_relu(self.get_submodule(name + "_bn"), self.get_submodule(name)(x))

    def _halve(self, x: Tensor) -> Tensor:
        """3×3 max pooling with stride 2, rounded as in Caffe: no padding, and the last window may exceed the edge."""
        return self._max_pool(x, 3, 2, 0, ceil_mode=True)

    def _block(self, name: str, x: Tensor) -> Tensor:
        one, *_, pool, projection = BN_BLOCKS[name]
        block = f"inception_{name}_"
        branches = [self._conv(block + "1x1", x)] if one else []
        branches.append(self._conv(block + "3x3", self._conv(block + "3x3_reduce", x)))
        double = self._conv(block + "double_3x3_1", self._conv(block + "double_3x3_reduce", x))
        branches.append(self._conv(block + "double_3x3_2", double))
        if projection:
            pooled = F.avg_pool2d(x, 3, 1, 1) if pool == "avg" else self._max_pool(x, 3, 1, 1)
            branches.append(self._conv(block + "pool_proj", pooled))
        else:
            # The strided convolutions round an odd side up, so the pool is padded by a zero, which is no maximum after ReLU.
            odd = x.shape[2] % 2, x.shape[3] % 2
            branches.append(self._halve(F.pad(x, (0, odd[1], 0, odd[0])) if any(odd) else x))
        return torch.cat(branches, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self._halve(self._conv("conv1_7x7_s2", images.flip(1)))
        x = self._halve(self._conv("conv2_3x3", self._conv("conv2_3x3_reduce", x)))
        for name in BN_BLOCKS:
            x = self._block(name, x)
        return x
