"""Presets: a config for every data set of the paper with the values of its Table 7, for the built-in and for your own data."""

from dataclasses import replace
from typing import Any

from xbm.errors import InputError, unknown
from xbm.losses import LOSSES
from xbm_app.models.trunks import TRUNKS as KNOWN
from xbm_app.train.config import Config, override

# Table 7: learning rate, decay, iterations, R_M, and for CUB and Cars α and m of the keyed memory over all N. The paper warms
# up for 1,000 iterations. It does not say so for CUB and Cars, with whole schedules of 1,400 and 2,000: there the warm-up is 0.
KEYED = {"memory.update": "backprop", "memory.ratio": 1.0, "memory.start": 0, "memory.momentum": 0.9}
SMALL = {"model.trunk": "small", "model.weights": "none", "model.dim": 64, "data.augmentation": "shift", "log.every": 50}
DATASETS: dict[str, dict[str, Any]] = {
    "sop": {"optim.lr": 3e-4, "optim.decay_at": (24_000,), "optim.iterations": 34_000, "memory.ratio": 1.0},
    "inshop": {"optim.lr": 3e-4, "optim.decay_at": (24_000,), "optim.iterations": 34_000, "memory.ratio": 0.2},
    "vehicleid": {"optim.lr": 1e-4, "optim.decay_at": (30_000,), "optim.iterations": 50_000, "memory.ratio": 0.5},
    "deepfashion2": {"optim.lr": 3e-4, "optim.decay_at": (20_000,), "optim.iterations": 36_000, "memory.ratio": 1.0},
    "cub": {"optim.lr": 3e-5, "optim.decay_at": (), "optim.iterations": 1_400, "memory.alpha": 0.2, **KEYED},
    "cars": {"optim.lr": 1e-4, "optim.decay_at": (1_400,), "optim.iterations": 2_000, "memory.alpha": 0.1, **KEYED},
    "glyphs": {
        **SMALL, "data.resize": 32, "data.crop": 32, "batch.size": 32, "optim.lr": 1e-3, "optim.iterations": 1_000,
        "optim.decay_at": (800,), "memory.start": 300, "loss.reduction": "mean", "memory.batch_weight": 1.0,
    },
    "omniglot": {
        **SMALL, "data.resize": 32, "data.crop": 32, "optim.lr": 1e-3, "optim.iterations": 3_000,
        "optim.decay_at": (2_400,), "memory.start": 100, "loss.reduction": "mean", "memory.batch_weight": 1.0,
    },
    "own": {
        "model.trunk": "efficientnet_lite0", "optim.lr": 1e-4, "optim.iterations": 2_000, "optim.decay_at": (1_400,),
        "memory.start": 100, "memory.batch_weight": 1.0,
    },
}  # fmt: skip
TRUNKS = {"googlenet": 512, "bn_inception": 512, "resnet50": 128}  # D as in the paper's tables

FULL_QUEUE = {"memory.update": "queue", "memory.momentum": None, "memory.ratio": 1.0, "memory.doubt": "keep"}

# The paper and its released code differ; both are settings of the same loop. `auto` is ours: with it a larger memory does not
# hurt, whatever the network and the data (docs/robustness.md).
RECIPES: dict[str, dict[str, Any]] = {
    "auto": {
        "loss.reduction": "sum", "memory.reduction": "balanced", "memory.batch_weight": 1.0, "memory.start": 0,
        "memory.fill": False, **FULL_QUEUE,
    },
    "paper": {},
    "official": {
        "memory.batch_weight": 1.0, "memory.fill": False, "optim.schedule": "plateau", "optim.lr": 1e-4,
        "data.augmentation": "official", "model.pooling": "max",
    },
}  # fmt: skip
SLOTS = {"memory.update": "moving_average", "memory.ratio": 1.0, "memory.momentum": 0.9}
# With a pretrained trunk an image's embedding moves little between two visits, so `auto` averages its views. Such a trunk also
# separates most classes from the start: the memory can start full, its hard negatives are real ones and need not be balanced,
# and a row among those of another class has a likely wrong label.
PRETRAINED = {
    **SLOTS, "memory.reduction": None, "memory.fill": True, "memory.doubt": "skip", "memory.dtype": "bfloat16",
}  # fmt: skip
# If an epoch takes many hundred iterations, an embedding moves too much between two visits for that: the supplementary's first
# table has the queue ahead on SOP and In-shop. There `auto` keeps a queue, of the size in the paper's Table 7.
LARGE = ("sop", "inshop", "vehicleid", "deepfashion2")
MANY = 20_000  # training images from which the user's own data counts as large; In-shop, the smallest of those, has 25,882


def recipe_of(name: str, weights: str, data: str, images: int = 0) -> dict[str, Any]:
    """The settings of a recipe for a data set and a trunk with these initial weights; `images`: training images of own data."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    if name != "auto" or weights == "none":
        return RECIPES[name]
    if data in LARGE or images >= MANY:
        return {**RECIPES[name], "memory.reduction": None, "memory.ratio": DATASETS[data].get("memory.ratio", 1.0)}
    return {**RECIPES[name], **PRETRAINED}


def preset(
    name: str, loss: str | None = None, trunk: str | None = None, recipe: str | None = None, weights: str | None = None
) -> Config:
    """Returns the config for a data set, with a loss, a trunk, a recipe and initial weights of the user's choice.

    Example:
        >>> preset("sop", trunk="resnet50").model.dim
        128
    """
    if name not in DATASETS:
        raise unknown("preset", name, DATASETS)
    # the paper's code excludes only the newest copy of an anchor, the library's default excludes every row of its image
    settings = {"data.name": name, "loss.exclude": "copy", **DATASETS[name]}
    config = override(Config(preset=name), settings)
    if recipe == "official" and config.model.trunk == "small":
        raise InputError("the recipe official is for photographs: use a preset with a pretrained trunk")
    if trunk is not None:
        if trunk not in KNOWN and not trunk.startswith("timm/"):
            raise unknown("trunk", trunk, [*KNOWN, "timm/NAME"])
        usual = "none" if trunk == "small" else "imagenet"
        dim = TRUNKS.get(trunk, config.model.dim)
        config = override(config, {"model.trunk": trunk, "model.weights": usual, "model.dim": dim})
    if weights is not None:
        config = override(config, {"model.weights": weights})
    if recipe is not None:
        config = replace(override(config, recipe_of(recipe, config.model.weights, name)), recipe=recipe)
    if loss is not None:
        names = {"ms": "multi_similarity"} | {name: name for name in LOSSES}
        if loss not in names:
            raise unknown("loss", loss, names)
        config = override(config, {"loss.name": names[loss]})
    return config
