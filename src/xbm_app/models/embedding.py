"""The embedding model: a trunk, pooling, and a linear head onto the unit sphere."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from xbm.errors import InputError, unknown
from xbm_app.models.trunks import Trunk, build_trunk

POOLINGS = ("average", "max")


class EmbeddingModel(nn.Module):
    """Maps images to embeddings. `build_model` returns one.

    Attributes:
        dim: D, the dimension of the embeddings.
        channels: of the images.
        mean, std: of each channel; images must be normalized with these after scaling their pixels to [0, 1].
        frozen_batch_norm: whether batch norm keeps its statistics in training; see `freeze_batch_norm`.
    """

    def __init__(self, trunk: Trunk, dim: int = 512, pooling: str = "average") -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise unknown("pooling", pooling, POOLINGS)
        if dim < 1:
            raise InputError(f"the dimension of an embedding must be at least 1, got {dim}")
        if trunk.pools and pooling != "average":
            raise InputError("this timm model has its own pooling: leave pooling at average, or choose another trunk")
        self.trunk = trunk.net
        self.head = nn.Linear(trunk.width, dim)
        self.dim, self.pooling = dim, pooling
        self.channels, self.mean, self.std = len(trunk.mean), trunk.mean, trunk.std
        self.frozen_batch_norm = False
        self._prefix = trunk.prefix

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

    def _pool(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != self.channels or not images.is_floating_point():
            raise InputError(
                f"images are {tuple(images.shape)} {images.dtype}: pass floats (B, {self.channels}, H, W), normalized with "
                "model.mean and model.std"
            )
        positions = _positions(self.trunk(images), self.head.in_features, self._prefix)
        return positions.mean(2) if self.pooling == "average" else positions.amax(2)

    def train(self, mode: bool = True) -> "EmbeddingModel":
        super().train(mode)
        if self.frozen_batch_norm:
            for module in self.trunk.modules():
                if isinstance(module, _BatchNorm):
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
    trunk: str = "googlenet", dim: int = 512, pooling: str = "average", weights: str = "imagenet", channels: int = 3
) -> EmbeddingModel:
    """Builds an embedding model.

    Args:
        trunk: "googlenet", "googlenet_bvlc" (as first published, without batch normalization), "resnet50", "resnet50_v1"
            (stride on the 1×1 convolution), "bn_inception", "efficientnet_lite0", "small" (for images of about 32 × 32), or
            "timm/NAME" for any model of timm.
        pooling: "average" (the paper), or "max" (its released code).
        weights: "imagenet", "none", or the path of a .safetensors or .pth file.
        channels: of the images: 3, or any number for the small trunk.

    Example:
        >>> import torch
        >>> model = build_model("small", dim=64, weights="none", channels=1)
        >>> model(torch.zeros(5, 1, 32, 32)).shape
        torch.Size([5, 64])
    """
    return EmbeddingModel(build_trunk(trunk, weights, channels), dim, pooling)


def freeze_batch_norm(model: EmbeddingModel) -> None:
    """Keeps batch norm in evaluation mode from now on, also after `model.train()`.

    Its statistics stay those of the pretrained weights; its scale and shift are still trained.
    """
    model.frozen_batch_norm = True
    model.train(model.training)


def parameter_groups(model: EmbeddingModel, lr: float, trunk_lr_scale: float = 1.0) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer: the trunk with `lr · trunk_lr_scale`, and the head with `lr`.

    Example:
        >>> model = build_model("small", dim=8, weights="none", channels=1)
        >>> [(group["name"], group["lr"]) for group in parameter_groups(model, 1.0, trunk_lr_scale=0.5)]
        [('trunk', 0.5), ('head', 1.0)]
    """
    if not trunk_lr_scale >= 0:
        raise InputError(f"trunk_lr_scale must be at least 0, got {trunk_lr_scale}")
    return [
        {"name": "trunk", "params": list(model.trunk.parameters()), "lr": lr * trunk_lr_scale},
        {"name": "head", "params": list(model.head.parameters()), "lr": lr},
    ]
