"""Puts the fused ops into a model. Only how modules compute changes: none is added, replaced or renamed, so that state dicts,
parameters, `train`, `eval` and frozen batch normalisation stay as they were.

Each op runs where it can, on channels-last maps on a GPU, and batch normalisation only in training; elsewhere torch does.
"""

from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xbm_app.models.fused.batch_norm import PLAIN, batch_norm_act
from xbm_app.models.fused.branches import beside
from xbm_app.models.fused.layout import readable
from xbm_app.models.fused.pad import pad
from xbm_app.models.googlenet import ALPHA, BETA, NEIGHBORS

Model = TypeVar("Model", bound=nn.Module)
ACTIVATIONS = {nn.Identity: "none", nn.ReLU: "relu", nn.ReLU6: "relu6"}


def fuse(model: Model) -> Model:
    """Makes batch normalisation, what follows it directly (ReLU, ReLU6), and max-pooling one op each, in place.

    Knows torch's BatchNorm2d and MaxPool2d, pairs of normalisation and activation in an nn.Sequential, torchvision's
    GoogLeNet and ResNets, timm's BatchNormAct2d and Conv2dSame, and our own trunks. Anything else is left alone. Fuse last:
    modules that are put in afterwards compute in their own way.

    Example:
        >>> from xbm_app.models import build_model
        >>> model = fuse(build_model("small", weights="none", channels=1))
        >>> model(torch.zeros(5, 1, 32, 32)).shape
        torch.Size([5, 512])
    """
    module: Any
    for module in model.modules():
        kind = _kind(module)
        if kind == BN_INCEPTION:
            module._norm_relu, module._max_pool = _norm_relu, _max_pool
        elif kind in FORWARDS and CAN_FUSE.get(kind, lambda _: True)(module):
            module.forward = MethodType(FORWARDS[kind], module)
            if kind in NORMS:
                _hand_out_tickets(module)
    return model


def _kind(module: nn.Module) -> str:
    """By name, so that nothing has to be imported to know it; subclasses may compute in other ways."""
    return f"{type(module).__module__}.{type(module).__name__}"


def _hand_out_tickets(norm: Any) -> None:
    tickets = torch.zeros(-(-norm.num_features // 16), dtype=torch.int32, device=norm.running_mean.device)
    norm.register_buffer("tickets", tickets, persistent=False)


def _then(norm: Any, x: Tensor, activation: str, more: Tensor | None = None) -> Tensor:
    """activation(norm(x) + more), whatever `norm` is."""
    if _hooked(norm) or not _fits(norm, x) or not (more is None or (readable(more) and more.dtype == x.dtype)):
        y = norm(x)
        return PLAIN[activation](y if more is None else y.add_(more))
    return _fused(norm, x, activation, more)


def _hooked(module: Any) -> bool:
    """Whether somebody wants to see what goes in or comes out."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _fits(norm: Any, x: Tensor) -> bool:
    return (
        getattr(norm, "tickets", None) is not None
        and norm.training
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == norm.running_mean.dtype == torch.float32
        and readable(x)
        and x.numel() > x.shape[1]  # torch refuses a variance of one number
    )


def _fused(norm: Any, x: Tensor, activation: str, more: Tensor | None = None) -> Tensor:
    return batch_norm_act(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.tickets,
        norm.momentum, norm.eps, activation, more,
    )  # fmt: skip


def _norm_relu(norm: Any, x: Tensor) -> Tensor:
    return _then(norm, x, "relu")


def _max_pool(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    kernel, step, pad, apart = (
        _side(size) for size in (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    )
    known = kernel in (2, 3) and step in (1, 2) and pad in (0, 1) and apart == 1
    if known and readable(x) and min(x.shape[2:]) + 2 * pad >= kernel:
        from xbm_app.models.fused.max_pool import max_pool

        return max_pool(x, kernel, step, pad, ceil_mode)
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


def _side(size: Any) -> int:
    """Of a square; −1 for any other shape."""
    sides = set(size) if isinstance(size, tuple | list) else {size}
    return sides.pop() if len(sides) == 1 else -1


# ------------------------------------------------------------------ forward methods, as theirs but fused


def _batch_norm(self: Any, x: Tensor) -> Tensor:
    return _fused(self, x, "none") if _fits(self, x) else type(self).forward(self, x)


def _timm_batch_norm_act(self: Any, x: Tensor) -> Tensor:
    return _fused(self, x, ACTIVATIONS[type(self.act)]) if _fits(self, x) else type(self).forward(self, x)


def _pool(self: Any, x: Tensor) -> Tensor:
    return _max_pool(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


def _conv_same(self: Any, x: Tensor) -> Tensor:
    if not readable(x):
        return type(self).forward(self, x)
    sides: list[int] = []
    for size, kernel, stride, dilation in zip(x.shape[2:], self.kernel_size, self.stride, self.dilation):
        more = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
        sides = [more // 2, more - more // 2, *sides]
    return self._conv_forward(pad(x, *sides), self.weight, self.bias)


def _sequential(self: Any, x: Any) -> Any:
    parts = iter(self)
    part = next(parts, None)
    while part is not None:
        following = next(parts, None)
        if _pair(part, following):
            x = _then(part, x, ACTIVATIONS[type(following)])
            following = next(parts, None)
        else:
            x = part(x)
        part = following
    return x


def _pair(part: nn.Module, following: nn.Module | None) -> bool:
    return type(part) is nn.BatchNorm2d and type(following) in ACTIVATIONS and not (_hooked(part) or _hooked(following))


def _basic_conv(self: Any, x: Tensor) -> Tensor:
    return _then(self.bn, self.conv(x), "relu")


def _inception(self: Any, x: Tensor) -> Tensor:
    return torch.cat(beside((self.branch1, self.branch2, self.branch3, self.branch4), x), 1)


def _response_norm(self: Any, x: Tensor) -> Tensor:
    if not readable(x):
        return type(self).forward(self, x)
    from xbm_app.models.fused.response_norm import response_norm

    return response_norm(x, ALPHA / NEIGHBORS, BETA)


def _basic_block(self: Any, x: Tensor) -> Tensor:
    if _hooked(self.relu):
        return type(self).forward(self, x)
    y = self.conv2(_then(self.bn1, self.conv1(x), "relu"))
    return _joined(self, self.bn2, y, x)


def _bottleneck(self: Any, x: Tensor) -> Tensor:
    if _hooked(self.relu):
        return type(self).forward(self, x)
    y = _then(self.bn2, self.conv2(_then(self.bn1, self.conv1(x), "relu")), "relu")
    return _joined(self, self.bn3, self.conv3(y), x)


def _joined(block: Any, norm: Any, y: Tensor, x: Tensor) -> Tensor:
    """The end of a residual block: what it made and what came in, added and activated."""
    return _then(norm, y, "relu", x if block.downsample is None else block.downsample(x))


BATCH_NORM, BATCH_NORM_ACT = "torch.nn.modules.batchnorm.BatchNorm2d", "timm.layers.norm_act.BatchNormAct2d"
SEQUENTIAL, MAX_POOL = "torch.nn.modules.container.Sequential", "torch.nn.modules.pooling.MaxPool2d"
BASIC_BLOCK, BOTTLENECK = (f"torchvision.models.resnet.{name}" for name in ("BasicBlock", "Bottleneck"))
BN_INCEPTION = "xbm_app.models.bn_inception.BNInception"
FORWARDS: dict[str, Callable] = {
    BATCH_NORM: _batch_norm,
    BATCH_NORM_ACT: _timm_batch_norm_act,
    SEQUENTIAL: _sequential,
    MAX_POOL: _pool,
    "timm.layers.conv2d_same.Conv2dSame": _conv_same,
    "torchvision.models.googlenet.BasicConv2d": _basic_conv,
    "torchvision.models.googlenet.Inception": _inception,
    "xbm_app.models.googlenet.Inception": _inception,
    "xbm_app.models.googlenet.LocalResponseNorm": _response_norm,
    BASIC_BLOCK: _basic_block,
    BOTTLENECK: _bottleneck,
}
NORMS = (BATCH_NORM, BATCH_NORM_ACT)
CAN_FUSE: dict[str, Callable[[Any], bool]] = {
    BATCH_NORM: lambda norm: norm.affine and norm.track_running_stats,
    BATCH_NORM_ACT: lambda norm: (
        norm.affine and norm.track_running_stats and type(norm.drop) is nn.Identity and type(norm.act) in ACTIVATIONS
    ),
    MAX_POOL: lambda pool: not pool.return_indices,
    BASIC_BLOCK: lambda block: type(block.relu) is nn.ReLU,
    BOTTLENECK: lambda block: type(block.relu) is nn.ReLU,
    SEQUENTIAL: lambda parts: any(_pair(*two) for two in pairwise(parts)),
}
