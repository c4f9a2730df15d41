"""BN-Inception, the paper's third trunk, from "Batch Normalization" (Ioffe and Szegedy, 2015)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 1024
# One row per block: 1×1 │ 3×3 reduce, 3×3 │ double 3×3 reduce, double 3×3 │ pool, its projection.
# A block without a 1×1 has stride 2 and no projection after its pooling.
BLOCKS = {
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
        for name, (one, reduce, three, double_reduce, double, _, projection) in BLOCKS.items():
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
        one, *_, pool, projection = BLOCKS[name]
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
        for name in BLOCKS:
            x = self._block(name, x)
        return x
