"""Trunks from timm: input, pooling and layers are what timm states for the model, and crops that a model cannot take."""

import copy
import os
import socket
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from xbm.errors import InputError, unknown
from xbm_app.models.weights import State, download

HUB = ("huggingface.co", 443)
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT")
PREFIX = "timm/"
LARGEST_SIDE = 384  # models that were trained on larger images are trained on `USUAL_SIDE` unless the config says otherwise
USUAL_SIDE = 224
GRID = 32  # pixels: networks with stages take sides that are a multiple of this
UNFIT = (
    AssertionError,
    AttributeError,
    IndexError,
    RuntimeError,
    TypeError,
    ValueError,
)  # NotImplementedError is a RuntimeError


class TimmInput(NamedTuple):
    """The images that a model expects, as timm states it."""

    side: int
    fraction: float  # of the resized image that a crop keeps
    interpolation: str


def timm_input(name: str) -> TimmInput:
    """What timm states about the input of "timm/NAME". Builds no network.

    Example:
        >>> timm_input("timm/resnet18.a1_in1k")
        TimmInput(side=224, fraction=0.95, interpolation='bicubic')
    """
    import timm

    stated = timm.get_pretrained_cfg(model_name(name))
    side = int(stated.input_size[1]) if stated is not None else USUAL_SIDE
    fraction = float(stated.crop_pct) if stated is not None else 1.0
    interpolation = stated.interpolation if stated is not None else ""
    return TimmInput(side, fraction, interpolation if interpolation in ("bilinear", "bicubic") else "bilinear")


def model_name(name: str) -> str:
    """timm's own name of a trunk, with its tag.

    Raises:
        InputError: timm has no such model or tag; names the nearest ones.
    """
    import timm

    model = name.removeprefix(PREFIX)
    base = model.partition(".")[0]
    if not timm.is_model(base):
        raise unknown("timm model", base, get_close_matches(base, timm.list_models(), n=3, cutoff=0))
    if model != base and model not in (tagged := timm.list_pretrained(base + ".*")):
        raise unknown("timm model", model, [base, *tagged])
    return model


def build_net(name: str, pooling: str) -> tuple[Any, dict[str, Any]]:
    """Builds a network without weights for images of its own size, and returns it with the options that were needed.

    With the pooling "own" it returns pooled features (B, width), otherwise a map or tokens; a few models cannot omit their
    pooling, and some fail only when run, hence the trial.
    """
    import timm

    model, reason = model_name(name), "more than one tensor"
    pooled: dict[str, Any] = {"num_classes": 0}
    for options in [pooled] if pooling == "own" else [{**pooled, "global_pool": ""}, pooled]:
        try:
            blank = _blank(model, options)
            features = _trial(blank, side_of(blank))
        except torch.OutOfMemoryError:
            raise
        except UNFIT as error:
            reason = str(error) or type(error).__name__
            continue
        if isinstance(features, Tensor) and width_of(blank) in features.shape[1:]:
            return timm.create_model(model, **options), options
    raise InputError(f"{name} does not return features of one width ({reason}): choose another timm model")


def fetch_weights(name: str, options: dict[str, Any], remedy: str) -> State:
    """Downloads the weights of a model that `build_net` has built with these options.

    Args:
        remedy: ends the message if that fails.
    """
    import timm

    def fetch() -> State:
        stated = timm.get_pretrained_cfg(model_name(name))
        if stated is not None and stated.hf_hub_id and not can_fetch(name):  # the hub's own client tries for 46 seconds
            raise ConnectionError(f"{HUB[0]} cannot be reached")
        return timm.create_model(model_name(name), pretrained=True, **options).state_dict()

    return download(name, fetch, remedy)()


def can_fetch(name: str) -> bool:
    """Whether the weights of "timm/NAME" are in the local cache, or their hub answers. Downloads nothing."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    stated = timm.get_pretrained_cfg(model_name(name))
    files = ("model.safetensors", "pytorch_model.bin")
    if (
        stated is not None
        and stated.hf_hub_id
        and any(isinstance(try_to_load_from_cache(stated.hf_hub_id, file), str) for file in files)
    ):
        return True
    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    if any(os.environ.get(each) for each in PROXIES):  # the hub is reached in another way
        return True
    try:
        with socket.create_connection(HUB, timeout=3):
            return True
    except OSError:
        return False


@cache
def is_transformer(name: str) -> bool:
    """Whether a trunk is a model of timm that divides images into patches and has no batch normalization.

    Example:
        >>> is_transformer("timm/vit_tiny_patch16_224"), is_transformer("timm/convnext_atto"), is_transformer("resnet50")
        (True, False, False)
    """
    if not name.startswith(PREFIX):
        return False
    net = _blank(model_name(name), {"num_classes": 0})
    return hasattr(net, "patch_embed") and not any(isinstance(module, _BatchNorm) for module in net.modules())


def width_of(net: Any) -> int:
    """Channels of the features."""
    return int(getattr(net, "head_hidden_size", None) or net.num_features)


def side_of(net: Any) -> int:
    """The side of the images that the net was built for."""
    from timm.data import resolve_model_data_config

    return int(resolve_model_data_config(net)["input_size"][1])


def set_side(net: Any, side: int) -> None:
    """Makes a net take images of `side`: transformers resample their position embeddings and windows, once and for all."""
    if side != side_of(net) and hasattr(net, "set_input_size"):
        with warnings.catch_warnings(action="ignore"):  # of timm's resampling, about torch's next versions
            net.set_input_size(img_size=(side, side))


def usable_side(name: str, wanted: int) -> int:
    """The side nearest to `wanted` that "timm/NAME" takes; the model's own if it takes no other.

    Example:
        >>> usable_side("timm/vit_tiny_patch16_224", 200), usable_side("timm/resnet10t", 200)
        (192, 200)
    """
    own = timm_input(name).side
    if wanted == own:
        return own
    net = _blank(model_name(name), {"num_classes": 0})
    size = getattr(getattr(net, "patch_embed", None), "patch_size", 1)
    patch = size if isinstance(size, int) else max(size)
    sides = {wanted, *_multiples(wanted, patch), *_multiples(wanted, GRID)}
    for side in sorted(sides, key=lambda each: (abs(each - wanted), each)):
        if side % patch == 0 and takes(net, side):
            return side
    return own


def takes(net: Any, side: int) -> bool:
    """Whether a net can be run on images of `side`."""
    try:
        adapted = copy.deepcopy(net)
        set_side(adapted, side)
        features = _trial(adapted, side)
    except torch.OutOfMemoryError:
        raise
    except UNFIT:
        return False
    return isinstance(features, Tensor) and 0 not in features.shape


def _multiples(side: int, of: int) -> Iterator[int]:
    low = side // of * of
    yield from (each for each in (low, low + of) if each)


def _blank(model: str, options: dict[str, Any]) -> Any:
    """A model without values, of which only shapes can be tried; with values where something in it needs them."""
    import timm

    try:
        with torch.device("meta"):
            net: Any = timm.create_model(model, **options)
        side = side_of(net)
        _trial(net, side)
        set_side(copy.deepcopy(net), 2 * side)
        return net
    except UNFIT:
        return timm.create_model(model, **options)


@torch.no_grad()
def _trial(net: Any, side: int) -> Any:
    """What a net returns for two images, without computing it if possible."""
    try:
        return copy.deepcopy(net).to("meta").eval()(torch.zeros(2, 3, side, side, device="meta"))
    except NotImplementedError:  # an operation that depends on values
        return copy.deepcopy(net).eval()(torch.zeros(2, 3, side, side))
