"""The embedding model: a trunk, pooling, and a linear head onto the unit sphere; its batch norm over several ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from xbm.distributed import Ranks
from xbm.errors import InputError, unknown
from xbm_app.models.trunks import Trunk, build_trunk

POOLINGS = ("average", "max", "own")
HEAD_INITS = ("uniform", "kaiming")
Named = tuple[str, nn.Parameter]


class EmbeddingModel(nn.Module):
    """Maps images to embeddings. `build_model` returns one. In place of images it takes their `features` (B, width).

    Attributes:
        dim: D, the dimension of the embeddings.
        channels: of the images.
        mean, std: of each channel; images must be normalized with these after scaling their pixels to [0, 1].
        frozen_batch_norm: whether batch norm keeps its statistics in training; see `freeze_batch_norm`.
        frozen: whether layers of the trunk are not trained; see `freeze`.
    """

    def __init__(self, trunk: Trunk, dim: int = 512, pooling: str = "average", head_init: str = "uniform") -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise unknown("pooling", pooling, POOLINGS)
        if head_init not in HEAD_INITS:
            raise unknown("model.head_init", head_init, HEAD_INITS)
        if dim < 1:
            raise InputError(f"the dimension of an embedding must be at least 1, got {dim}")
        if trunk.pools and pooling == "max":
            raise InputError("this timm model has its own pooling: leave pooling at average, or choose another trunk")
        self.trunk = trunk.net
        self.head = nn.Linear(trunk.width, dim)
        if head_init == "kaiming":
            nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
            nn.init.zeros_(self.head.bias)
        self.dim, self.pooling = dim, pooling
        self.channels, self.mean, self.std = len(trunk.mean), trunk.mean, trunk.std
        self.frozen_batch_norm = self.frozen = False
        self._prefix = trunk.prefix
        self._compiled: tuple[Any, ...] = ()  # within a tuple, so that it is no module of its own

    def forward(self, images: Tensor) -> Tensor:
        """Returns the embeddings.

        Args:
            images: (B, channels, H, W), normalized.

        Returns:
            (B, D) float32, also under autocast; rows of unit length.
        """
        return F.normalize(self.logits(images).float())

    def logits(self, images: Tensor) -> Tensor:
        """Returns the head's output before normalization: class scores if the head is trained to classify.  # (B, D)"""
        return self.head(self._pool(images))

    def pooled(self, images: Tensor) -> Tensor:
        """Returns the pooled features on the unit sphere, which the paper's drift study uses.  # (B, width) float32"""
        return F.normalize(self._pool(images).float())

    def features(self, images: Tensor) -> Tensor:
        """Returns the pooled features, the head's input.  # (B, width)"""
        return self._pool(images)

    def _pool(self, images: Tensor) -> Tensor:
        if images.dim() == 2 and images.shape[1] == self.head.in_features:
            return images
        if images.dim() != 4 or images.shape[1] != self.channels or not images.is_floating_point():
            raise InputError(
                f"images are {tuple(images.shape)} {images.dtype}: pass floats (B, {self.channels}, H, W), normalized with "
                "model.mean and model.std"
            )
        trunk = self._compiled[0] if self._compiled and self.training else self.trunk
        positions = _positions(trunk(images), self.head.in_features, self._prefix)
        return positions.amax(2) if self.pooling == "max" else positions.mean(2)

    def compile_trunk(self) -> None:
        """Runs the trunk through torch.compile in training; evaluation stays eager, and equal to that of a loaded model."""
        self._compiled = (torch.compile(self.trunk),)

    @property
    def compiled(self) -> bool:
        return bool(self._compiled)

    def train(self, mode: bool = True) -> "EmbeddingModel":
        super().train(mode)
        if self.frozen_batch_norm:
            for module in self.trunk.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        if self.frozen:
            for module in self.trunk.modules():
                if not any(p.requires_grad for p in module.parameters()) and any(True for _ in module.parameters()):
                    module.eval()
        return self


def _positions(features: Tensor, width: int, prefix: int) -> Tensor:
    """Converts the output of a trunk, a map or tokens, to one column per position.  # (B, width, positions)"""
    if features.dim() == 3:  # tokens
        return features[:, prefix:].mT
    if features.dim() == 4 and features.shape[1] != width:  # channels last
        features = features.permute(0, 3, 1, 2)
    return features.flatten(2) if features.dim() == 4 else features[:, :, None]


def build_model(
    trunk: str = "googlenet",
    dim: int = 512,
    pooling: str = "average",
    weights: str = "imagenet",
    channels: int = 3,
    head_init: str = "uniform",
    side: int | None = None,
) -> EmbeddingModel:
    """Builds an embedding model.

    Args:
        trunk: "googlenet", "googlenet_bvlc" (as first published, without batch normalization), "resnet50", "resnet50_v1"
            (stride on the 1×1 convolution), "bn_inception", "efficientnet_lite0", "small" (for images of about 32 × 32), or
            "timm/NAME" for any model of timm.
        pooling: "average" (the paper), "max" (its released code), or "own": that of the timm model.
        weights: "imagenet", "none", or the path of a .safetensors or .pth file.
        channels: of the images: 3, or any number for the small trunk.
        head_init: "uniform" (that of `nn.Linear`), or "kaiming" (the paper's released code).
        side: of the images in pixels; a timm model is adapted to it (default: the side that it was trained with).

    Example:
        >>> import torch
        >>> model = build_model("small", dim=64, weights="none", channels=1)
        >>> model(torch.zeros(5, 1, 32, 32)).shape
        torch.Size([5, 64])
    """
    return EmbeddingModel(build_trunk(trunk, weights, channels, pooling, side), dim, pooling, head_init)


def freeze_batch_norm(model: EmbeddingModel) -> None:
    """Keeps batch norm in evaluation mode from now on, also after `model.train()`.

    Its statistics stay those of the pretrained weights; its scale and shift are still trained.
    """
    model.frozen_batch_norm = True
    model.train(model.training)


def freeze(model: EmbeddingModel, what: str) -> None:
    """Stops training the first layers of the trunk: their backward pass is skipped, and they stay in evaluation mode.

    Args:
        what: "none", "trunk", or "blocks:N": the stem and the first N blocks.

    Example:
        >>> model = build_model("small", dim=8, weights="none", channels=1)
        >>> freeze(model, "blocks:3")
        >>> [name for name, p in model.named_parameters() if p.requires_grad][0]
        'trunk.blocks.3.0.weight'
    """
    if what == "none":
        return
    kind, _, number = what.partition(":")
    layers = layers_of(model.trunk)
    if kind not in ("trunk", "blocks") or (number.isdecimal() and int(number) > 0) != (kind == "blocks"):
        raise InputError(f"model.freeze must be none, trunk, or blocks:N such as blocks:{max(1, len(layers) // 2)}, got {what}")
    if kind == "blocks" and int(number) + 1 >= len(layers):
        most = f"up to blocks:{len(layers) - 2} can be frozen" if len(layers) > 2 else "this trunk has no blocks"
        raise InputError(f"model.freeze={what}, but {most}: choose fewer, or set model.freeze=trunk")
    for layer in layers if kind == "trunk" else layers[: int(number) + 1]:
        for _, p in layer:
            p.requires_grad_(False)
    model.frozen = True
    model.train(model.training)


def layers_of(trunk: nn.Module) -> list[list[Named]]:
    """The parameters of a trunk by layer, from the input on: the stem, its blocks, and what follows them.

    timm's models say what their blocks are. In other networks, single layers at the beginning are the stem, and every other
    child is a block.
    """
    matcher: Any = getattr(trunk, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        values = dict(trunk.named_parameters())
        groups = group_parameters(trunk, matcher(coarse=False))
        return [[(name, values[name]) for name in groups[number]] for number in sorted(groups)]
    path, children = "", list(trunk.named_children())
    while len(children) == 1:
        path, children = f"{path}{children[0][0]}.", list(children[0][1].named_children())
    layers: list[list[Named]] = [[]]
    for name, child in children:
        named = [(f"{path}{name}.{inner}", p) for inner, p in child.named_parameters()]
        if len(layers) == 1 and not any(True for _ in child.children()):
            layers[0] += named
        elif named:
            layers.append(named)
    return layers


def parameter_groups(
    model: EmbeddingModel, lr: float, trunk_lr_scale: float = 1.0, layer_decay: float = 1.0, decay_all: bool = True
) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer: the trunk with `lr · trunk_lr_scale`, and the head with `lr`.

    Args:
        layer_decay: factor of the learning rate from each layer of the trunk to the one before it.
        decay_all: False spares norms and biases from weight decay.

    Example:
        >>> model = build_model("small", dim=8, weights="none", channels=1)
        >>> [(group["name"], group["lr"]) for group in parameter_groups(model, 1.0, trunk_lr_scale=0.5)]
        [('trunk', 0.5), ('head', 1.0)]
    """
    if not trunk_lr_scale >= 0:
        raise InputError(f"trunk_lr_scale must be at least 0, got {trunk_lr_scale}")
    layers = [list(model.trunk.named_parameters())] if layer_decay == 1 else layers_of(model.trunk)
    groups = []
    for number, layer in enumerate(layers):
        scale = trunk_lr_scale * layer_decay ** (len(layers) - 1 - number)
        groups += _groups("trunk" if len(layers) == 1 else f"trunk {number}", layer, lr * scale, decay_all)
    return groups + _groups("head", model.head.named_parameters(), lr, decay_all)


def _groups(name: str, named: Iterable[Named], lr: float, decay_all: bool) -> list[dict[str, Any]]:
    """One group, or one without weight decay and one with it."""
    trained = [p for _, p in named if p.requires_grad]
    if decay_all:
        return [{"name": name, "params": trained, "lr": lr}] if trained else []
    spared, decayed = [p for p in trained if p.dim() < 2], [p for p in trained if p.dim() >= 2]
    groups = [{"name": f"{name}, no decay", "params": spared, "lr": lr, "weight_decay": 0.0}] if spared else []
    return groups + ([{"name": name, "params": decayed, "lr": lr}] if decayed else [])


# ------------------------------------------------------------------ batch norm with the statistics of the global batch
# Over all ranks, on any device. With separate statistics per rank, a global batch of 32 glyphs on two ranks lost four points of
# R@1: each rank sees 16 images of four classes. torch's SyncBatchNorm does not run on a CPU, where several ranks must give the
# same result as one.

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
