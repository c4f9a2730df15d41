"""Presets: a config for every data set of the paper with the values of its Table 7, for the built-in and for your own data."""

from dataclasses import replace
from typing import Any

from xbm.errors import InputError, unknown
from xbm_app.models.timm_trunks import GRID, LARGEST_SIDE, PREFIX, USUAL_SIDE, timm_input, usable_side
from xbm_app.models.trunks import TRUNKS as KNOWN
from xbm_app.train.config import Config, Data, override
from xbm_app.train.losses import check_name, takes_memory

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
SHORT = {"ms": "multi_similarity"}  # losses by their abbreviations
TRUNKS = {"googlenet": 512, "bn_inception": 512, "resnet50": 128}  # D as in the paper's tables

SMALL_CROP = 64  # pixels: crops below this are for data sets of small images
# Own photographs, if no pretrained weights are at hand.
FROM_SCRATCH = {"model.trunk": "small", "model.weights": "none", "model.dim": 64, "optim.lr": 1e-3}

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
        **FULL_QUEUE, "memory.alpha": 0.1, "memory.size": 55_000, "memory.start": 1000, "memory.fill": False,
        "memory.batch_weight": 1.0, "memory.reduction": None, "optim.lr": 1e-4, "optim.iterations": 35_000,
        "optim.schedule": "plateau", "optim.decay_at": (), "data.holdout": 0.2, "log.evaluate_every": 1000,
        "data.augmentation": "official", "model.pooling": "max", "model.dim": 128, "model.head_init": "kaiming",
    },
}  # fmt: skip
# What the recipe's source does, by the setting that stands for it; `xbm presets NAME --recipe RECIPE` prints it beside them.
FACTS: dict[str, dict[str, str]] = {
    "paper": {
        "data.resize": "256 × 256, random crop of 224, flip",
        "batch.size": "PK; 64 unless said otherwise",
        "optim.precision": "not stated. Exception: on a GPU, bfloat16 autocast; optim.precision=fp32 is full precision",
        "optim.lr": "Table 7, which covers the models with memory only",
        "memory.start": "1,000 iterations in general. Exception: none on CUB and Cars, with 1,400 and 2,000 in all",
        "memory.fill": "random training images, embedded after the warm-up",
        "memory.batch_weight": "Algorithm 1: only the loss against the memory is left",
        "memory.alpha": "Table 7. Exception: the printed update ascends, this descends; a negative α ascends",
        "memory.momentum": "Table 7",
        "memory.dtype": "not stated. Exception: on a GPU, a queue is bfloat16",
    },
    "official": {
        "data.augmentation": "shorter side 256, resized crop of 0.2 to 1 of the area, flip; test: center crop",
        "data.holdout": "none: it looks at R@1 and MAP@R of the test list. Here held-out training classes are looked at",
        "log.evaluate_every": "every 1,000 iterations, and keeps the checkpoint of the best MAP@R",
        "model.pooling": "global max",
        "model.dim": "the memory has 128 dimensions, so the head has too",
        "model.head_init": "Kaiming normal, fan out; the bias starts at 0",
        "batch.size": "64 = 16 classes × 4 images",
        "loss.name": "contrastive: λ 0.5; MS: α 2, β 40, λ 0.5, ε 0.1; triplet: other weights than here",
        "loss.exclude": "positives below 1 − 1e-5; here the anchor's own row is found by its slot",
        "memory.size": "55,000 rows; here none is lost at the end of a lap",
        "memory.update": "queue only",
        "memory.start": "1,000",
        "memory.fill": "starts empty",
        "memory.batch_weight": "1: the loss in the batch",
        "memory.weight": "1: plus the loss against the memory, each divided by m",
        "memory.dtype": "float32. Exception: on a GPU, a queue is bfloat16",
        "optim.lr": "Adam, 1e-4",
        "optim.weight_decay": "5e-4",
        "optim.iterations": "35,000",
        "optim.schedule": "× 0.1 on a plateau of R@1: mode max, threshold 0.001, patience 4, cooldown 2, floor lr / 20",
        "optim.precision": "float32. Exception: on a GPU, bfloat16 autocast; optim.precision=fp32 is full precision",
    },
}
# Where the released code cannot run as published, or loses rows; the recipe does what its other lines mean.
FAULTS = (
    "cannot run: its scheduler reads R@1, a key that is never written, and stops with a KeyError at iteration 1,000",
    "cannot run with the triplet loss: it computes 1 - bool, which torch refuses",
    "loses a batch a lap: one that does not fit at the end of the memory overwrites the last rows",
)
SLOTS = {"memory.update": "moving_average", "memory.ratio": 1.0, "memory.momentum": 0.9}
# With a pretrained trunk an image's embedding moves little between two visits, so `auto` averages its views. Such a trunk also
# separates most classes from the start: the memory can start full, its hard negatives are real ones and need not be balanced,
# and a row among those of another class has a likely wrong label.
PRETRAINED = {
    **SLOTS, "memory.reduction": None, "memory.fill": True, "memory.doubt": "skip", "memory.dtype": "bfloat16",
}  # fmt: skip
# A head on the features of a frozen trunk: its rows move fast, as from scratch, and the sum tears classes apart. On held-out
# training classes of Cars it retrieves less than a random head with the sum at this rate, and more with this.
FROZEN = {"memory.reduction": "balanced", "optim.lr": 1e-3}
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


def timm_settings(trunk: str, data: Data) -> dict[str, Any]:
    """The settings that suit a model of timm: images as large as it was trained with, resized in the same way, its pooling.

    Small images stay small, and transformers trained on very large ones start at a usual size.
    """
    stated, small = timm_input(trunk), data.crop < SMALL_CROP
    own = stated.side if stated.side <= LARGEST_SIDE else USUAL_SIDE
    crop = usable_side(trunk, data.crop if small else own)
    resize = crop if data.resize == data.crop else resize_for(crop, stated.fraction)
    return {
        "data.crop": crop, "data.resize": resize, "data.interpolation": stated.interpolation, "model.pooling": "own",
    }  # fmt: skip


def resize_for(crop: int, fraction: float = 1.0) -> int:
    """The side to which images are resized before a window of `crop` is cropped: at least the paper's share, 256 to 224."""
    return round(crop / min(fraction, 224 / 256))


def small_image_settings(config: Config, side: int) -> dict[str, int]:
    """A smaller crop for images of which most are no larger than `side`; {} if the config suits them.

    A trunk that starts from scratch sees them as they are, a pretrained one at twice their size. The trunk `small` is for
    images of up to 64 pixels and sees larger ones at that size.

    Example:
        >>> small_image_settings(preset("own", trunk="resnet50"), side=64)
        {'data.crop': 128, 'data.resize': 146}
    """
    model = config.model
    wanted = min(side, SMALL_CROP) if model.trunk == "small" else side if model.weights == "none" else 2 * side
    crop = -(-wanted // GRID) * GRID
    if model.trunk.startswith(PREFIX):
        crop = usable_side(model.trunk, min(crop, config.data.crop))
    return {"data.crop": crop, "data.resize": resize_for(crop)} if crop < config.data.crop else {}


def few_classes_settings(config: Config, classes: int) -> dict[str, int]:
    """A smaller batch for training sets with fewer classes than a batch has; {} if the config suits them.

    Example:
        >>> few_classes_settings(preset("own"), classes=10)
        {'batch.size': 40}
    """
    batch = config.batch
    kept = classes - round(config.data.holdout * classes)
    if batch.sampler == "shuffle" or kept < 2 or kept * batch.per_class >= batch.size:
        return {}
    return {"batch.size": kept * batch.per_class}


def preset(
    name: str, loss: str | None = None, trunk: str | None = None, recipe: str | None = None, weights: str | None = None
) -> Config:
    """Returns the config for a data set, with a loss, a trunk, a recipe and initial weights of the user's choice.

    A loss that takes no memory is trained without one.

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
        if trunk not in KNOWN and not trunk.startswith(PREFIX):
            raise unknown("trunk", trunk, [*KNOWN, "timm/NAME"])
        usual = "none" if trunk == "small" else "imagenet"
        dim = TRUNKS.get(trunk, config.model.dim)
        config = override(config, {"model.trunk": trunk, "model.weights": usual, "model.dim": dim})
        if trunk.startswith(PREFIX):
            config = override(config, timm_settings(trunk, config.data))
    if weights is not None:
        config = override(config, {"model.weights": weights})
    if recipe is not None:
        config = replace(override(config, recipe_of(recipe, config.model.weights, name)), recipe=recipe)
    if loss is not None:
        name = SHORT.get(loss, loss)
        check_name(name)
        without = {} if takes_memory(name) else {"memory.ratio": 0.0}
        config = override(config, {"loss.name": name, **without})
    return config
