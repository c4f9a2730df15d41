"""Fused layers for GPU training: batch normalization with its activation, and max-pooling, as one Triton op each.

Beside the convolutions, memory traffic bounds a training step on a GPU, and these ops read and write less. `fuse` puts them
into a model. Only how modules compute changes: none is added, replaced or renamed, so state dicts, parameters, `train`, `eval`
and frozen batch normalization stay as they were.

Each op runs where it can: on channels-last maps on a GPU, and batch normalization only in training. Elsewhere torch's own runs.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xbm_app.models.fused.channels_last import readable
from xbm_app.models.inception import ALPHA, BETA, NEIGHBORS

__all__ = ["fuse"]

WORD = torch.int64
Model = TypeVar("Model", bound=nn.Module)
ACTIVATIONS = {nn.Identity: "none", nn.ReLU: "relu", nn.ReLU6: "relu6"}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": lambda y: F.relu(y, inplace=True),
    "relu6": lambda y: F.relu6(y, inplace=True),
}


def fuse(model: Model) -> Model:
    """Fuses batch normalization with the activation after it (ReLU, ReLU6), and max-pooling, in place.

    It recognizes torch's BatchNorm2d and MaxPool2d, pairs of normalization and activation in an nn.Sequential, torchvision's
    GoogLeNet and ResNets, timm's BatchNormAct2d and Conv2dSame, and the trunks of this package. Everything else is left
    alone. Fuse last: modules that are added afterwards are not fused.

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
                _add_tickets(module)
    return model


def _kind(module: nn.Module) -> str:
    """The full name of the class, so that nothing has to be imported. Subclasses may compute something else."""
    return f"{type(module).__module__}.{type(module).__name__}"


def _add_tickets(norm: Any) -> None:
    """A counter for each block of channels: the program that ends last merges the others' results."""
    tickets = torch.zeros(-(-norm.num_features // 16), dtype=torch.int32, device=norm.running_mean.device)
    norm.register_buffer("tickets", tickets, persistent=False)


def _norm_act(norm: Any, x: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
    """activation(norm(x) + residual), fused if possible."""
    can_add = residual is None or (readable(residual) and residual.dtype == x.dtype)
    if _hooked(norm) or not _fits(norm, x) or not can_add:
        y = norm(x)
        return IN_PLACE[activation](y if residual is None else y.add_(residual))
    return _fused(norm, x, activation, residual)


def _hooked(module: Any) -> bool:
    """Whether a hook wants to see what goes in or comes out."""
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


def _fused(norm: Any, x: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
    from xbm_app.models.fused.batch_norm import BatchNormAct  # it needs Triton, which a CPU may not have

    running = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return BatchNormAct.apply(x, norm.weight, norm.bias, residual, *running, norm.tickets, norm.momentum, norm.eps, activation)


def _norm_relu(norm: Any, x: Tensor) -> Tensor:
    return _norm_act(norm, x, "relu")


def _max_pool(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    kernel, step, border, spacing = (
        _side(size) for size in (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    )
    known = kernel in (2, 3) and step in (1, 2) and border in (0, 1) and spacing == 1
    if known and readable(x) and min(x.shape[2:]) + 2 * border >= kernel:
        from xbm_app.models.fused.window_layers import max_pool

        return max_pool(x, kernel, step, border, ceil_mode)
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


def _side(size: Any) -> int:
    """The side of a square window; −1 for any other shape."""
    sides = set(size) if isinstance(size, tuple | list) else {size}
    return sides.pop() if len(sides) == 1 else -1


def in_parallel(branches: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    """The outputs of the branches of a block; inside a CUDA graph, each branch runs on its own stream.

    One branch alone is too small to fill a GPU. A graph keeps the memory of the branches apart and launches at no cost; the
    backward pass uses the same streams.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return [branch(x) for branch in branches]
    main, side_streams = torch.cuda.current_stream(x.device), _streams(x.device, len(branches) - 1)
    outputs: list[Tensor] = []
    for stream, branch in zip(side_streams, branches[1:]):
        stream.wait_stream(main)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            outputs.append(branch(x))
    first = branches[0](x)
    for stream, output in zip(side_streams, outputs):
        main.wait_stream(stream)
        output.record_stream(main)
    return [first, *outputs]


@lru_cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]


# ------------------------------------------------------------------ zero-padding of channels-last maps in words of eight bytes
# torch copies number by number, and a number has two or four.


def pad(x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
    """F.pad(x, (left, right, top, bottom)) for a map (N, C, H, W)."""
    if not in_words(x) or min(left, right, top, bottom) < 0:
        return F.pad(x, (left, right, top, bottom))
    return _Pad.apply(x, left, right, top, bottom)


def in_words(x: Tensor) -> bool:
    """Whether every pixel of the map consists of whole words."""
    whole = x.shape[1] * x.element_size() % WORD.itemsize == 0 and x.storage_offset() * x.element_size() % WORD.itemsize == 0
    return whole and x.is_contiguous(memory_format=torch.channels_last)


def as_words(x: Tensor) -> Tensor:
    """(N, H, words of a row): a view of the same memory."""
    return x.permute(0, 2, 3, 1).flatten(2).view(WORD)


def empty_map(x: Tensor, H: int, W: int) -> Tensor:
    """An empty channels-last map with the images and channels of `x`."""
    return torch.empty((*x.shape[:2], H, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
        _, C, H, W = x.shape
        ctx.sides = left, right, top, bottom
        y = empty_map(x, top + H + bottom, left + W + right)
        pixel = C * x.element_size() // WORD.itemsize
        words = as_words(y)
        words[:, :top].zero_()
        words[:, top + H :].zero_()
        middle = words[:, top : top + H]
        middle[..., : left * pixel].zero_()
        middle[..., (left + W) * pixel :].zero_()
        middle[..., left * pixel : (left + W) * pixel] = as_words(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        left, right, top, bottom = ctx.sides
        _, C, H, W = dy.shape
        if torch.is_grad_enabled() or not in_words(dy):  # torch's own operation has a second derivative
            return F.pad(dy, (-left, -right, -top, -bottom)), None, None, None, None
        dx = empty_map(dy, H - top - bottom, W - left - right)
        pixel = C * dy.element_size() // WORD.itemsize
        as_words(dx).copy_(as_words(dy)[:, top : H - bottom, left * pixel : (W - right) * pixel])
        return dx, None, None, None, None


# ------------------------------------------------------------------ forward methods that replace those of the modules


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
        padding = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
        sides = [padding // 2, padding - padding // 2, *sides]
    return self._conv_forward(pad(x, *sides), self.weight, self.bias)


def _sequential(self: Any, x: Any) -> Any:
    parts = iter(self)
    part = next(parts, None)
    while part is not None:
        following = next(parts, None)
        if _pair(part, following):
            x = _norm_act(part, x, ACTIVATIONS[type(following)])
            following = next(parts, None)
        else:
            x = part(x)
        part = following
    return x


def _pair(part: nn.Module, following: nn.Module | None) -> bool:
    return type(part) is nn.BatchNorm2d and type(following) in ACTIVATIONS and not (_hooked(part) or _hooked(following))


def _basic_conv(self: Any, x: Tensor) -> Tensor:
    return _norm_act(self.bn, self.conv(x), "relu")


def _inception(self: Any, x: Tensor) -> Tensor:
    return torch.cat(in_parallel((self.branch1, self.branch2, self.branch3, self.branch4), x), 1)


def _response_norm(self: Any, x: Tensor) -> Tensor:
    if not readable(x):
        return type(self).forward(self, x)
    from xbm_app.models.fused.window_layers import response_norm

    return response_norm(x, ALPHA / NEIGHBORS, BETA)


def _basic_block(self: Any, x: Tensor) -> Tensor:
    if _hooked(self.relu):
        return type(self).forward(self, x)
    y = self.conv2(_norm_act(self.bn1, self.conv1(x), "relu"))
    return _add_shortcut(self, self.bn2, y, x)


def _bottleneck(self: Any, x: Tensor) -> Tensor:
    if _hooked(self.relu):
        return type(self).forward(self, x)
    y = _norm_act(self.bn2, self.conv2(_norm_act(self.bn1, self.conv1(x), "relu")), "relu")
    return _add_shortcut(self, self.bn3, self.conv3(y), x)


def _add_shortcut(block: Any, norm: Any, y: Tensor, x: Tensor) -> Tensor:
    """The end of a residual block: normalizes, adds the shortcut and activates."""
    return _norm_act(norm, y, "relu", x if block.downsample is None else block.downsample(x))


BATCH_NORM, BATCH_NORM_ACT = "torch.nn.modules.batchnorm.BatchNorm2d", "timm.layers.norm_act.BatchNormAct2d"
SEQUENTIAL, MAX_POOL = "torch.nn.modules.container.Sequential", "torch.nn.modules.pooling.MaxPool2d"
BASIC_BLOCK, BOTTLENECK = (f"torchvision.models.resnet.{name}" for name in ("BasicBlock", "Bottleneck"))
BN_INCEPTION = "xbm_app.models.inception.BNInception"
FORWARDS: dict[str, Callable] = {
    BATCH_NORM: _batch_norm,
    BATCH_NORM_ACT: _timm_batch_norm_act,
    SEQUENTIAL: _sequential,
    MAX_POOL: _pool,
    "timm.layers.conv2d_same.Conv2dSame": _conv_same,
    "torchvision.models.googlenet.BasicConv2d": _basic_conv,
    "torchvision.models.googlenet.Inception": _inception,
    "xbm_app.models.inception.Inception": _inception,
    "xbm_app.models.inception.LocalResponseNorm": _response_norm,
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
