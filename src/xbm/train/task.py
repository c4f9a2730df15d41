"""From a config to what the loop needs: data, feeds, sampler, model, loss, memory."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from xbm.data.feeds import DecodeFeed, Feed, ResidentFeed, StoreFeed
from xbm.data.images import Dataset, ImageSet, Protocol
from xbm.data.samplers import PKSampler, ShuffleSampler
from xbm.data.transforms import Augmentation
from xbm.errors import InputError, unknown
from xbm.losses import LOSSES, PairLoss
from xbm.memory import CrossBatchMemory
from xbm.models import EmbeddingModel, build_model, freeze_batch_norm
from xbm.train import config as configs
from xbm.train.config import Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KINDS = {"paper": "crop", "official": "resized_crop", "shift": "shift", "none": "none"}
RESIDENT_BYTES = 2 << 30  # on a CPU, sets up to this size are kept decoded in main memory


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"there is no device {name!r}: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for but no GPU is visible: use device=cpu, or mend the driver")
    return device


def read_data(data: configs.Data) -> Dataset:
    """The data set a config names."""
    from xbm.data.benchmarks import BENCHMARKS, read_benchmark

    if data.name == "glyphs":
        from xbm.data.glyphs import read_glyphs

        return read_glyphs(size=data.resize)
    if data.name != "own" and data.name not in BENCHMARKS:
        raise unknown("data set", data.name, ["glyphs", "own", *BENCHMARKS])
    if data.root is None:
        raise InputError(f"{data.name} needs to know where its images are: give --root DIR (data.root)")
    root = Path(data.root)
    if data.name == "own":
        from xbm.data.own import read_folder, read_table

        return read_folder(root) if root.is_dir() else read_table(root)
    return read_benchmark(data.name, root)


def read_checked(config: Config) -> Dataset:
    """The data set, less its held-out classes where some are asked for; own data is looked through before any training.

    Raises:
        InputError: own data has problems and `data.skip_problems` does not say to leave them out.
    """
    dataset = read_data(config.data)
    if config.data.name == "own":
        from xbm.data.check import BROKEN, check_dataset, report, skip_problems

        problems = check_dataset(dataset)
        if problems:
            print(report(problems), file=sys.stderr)
        if config.data.skip_problems:
            dataset = skip_problems(dataset, problems)
        elif broken := [problem for problem in problems if problem.kind in BROKEN]:
            raise InputError(f"{len(broken)} images in {config.data.root} are broken: mend them, or add --skip-problems")
    return hold_out(dataset, config.data.holdout) if config.data.holdout else dataset


def hold_out(dataset: Dataset, share: float) -> Dataset:
    """Trains on some training classes and scores on the others: for choosing anything without a look at the test classes.

    A class belongs to the held-out part by a hash of its name, so that every run chooses on the same ones.
    """
    train = dataset.train
    order = sorted(range(train.num_classes), key=lambda k: hashlib.sha256(str(train.class_names[k]).encode()).digest())
    count = round(share * train.num_classes)
    if not 1 < count < train.num_classes - 1:
        raise InputError(f"data.holdout={share} of {train.num_classes} classes leaves too few on one side: try 0.2")
    held = np.isin(train.labels, order[:count])
    ks = dataset.protocols[0].ks
    kept = train.select(np.flatnonzero(~held), f"{train.name} (less the held-out classes)")
    scored = train.select(np.flatnonzero(held), f"{train.name} (held-out classes)")
    return replace(dataset, train=kept, protocols=(Protocol("held-out", scored, ks),))


def augmentation_of(config: Config, model: EmbeddingModel) -> Augmentation:
    data, channels = config.data, len(model.mean)
    if data.augmentation not in KINDS:
        raise unknown("data.augmentation", data.augmentation, KINDS)
    kind = KINDS[data.augmentation]
    return Augmentation(
        kind=kind,
        resize=data.resize,
        crop=data.crop,
        flip=kind in ("crop", "resized_crop"),
        padding=max(1, data.crop // 16) if kind == "shift" else 0,
        mean=model.mean,
        std=model.std,
        channels=channels,
    )


def feed_of(images: ImageSet, config: Config, augmentation: Augmentation, device: torch.device) -> Feed:
    """How images reach the model: `data.feed`, or what suits the set and the machine."""
    how, store = config.data.feed, None
    if config.data.store is not None:
        from xbm.data.store import open_store

        store = open_store(Path(config.data.store), images)
    if how == "auto":
        size = len(images) * augmentation.resize**2 * augmentation.channels
        fits = size < (torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else RESIDENT_BYTES)
        if images.pixels is not None or (fits and device.type == "cuda"):
            how = "resident"
        else:
            how = "store" if store is not None else "decode"
    if how == "resident":
        return ResidentFeed(store or images, augmentation, config.seed, device)
    if how == "store":
        if store is None:
            raise InputError("data.feed=store needs data.store: make one with `xbm prepare`")
        return StoreFeed(store, augmentation, config.seed)
    if how == "decode":
        return DecodeFeed(images, augmentation, config.seed)
    raise unknown("data.feed", how, ["auto", "decode", "store", "resident"])


def sampler_of(images: ImageSet, config: Config) -> PKSampler | ShuffleSampler:
    batch = config.batch
    if batch.sampler == "shuffle":
        return ShuffleSampler(len(images), batch.size, config.seed)
    if batch.sampler != "pk":
        raise unknown("batch.sampler", batch.sampler, ["pk", "shuffle"])
    if batch.size % batch.per_class:
        raise InputError(f"batch.size={batch.size} is not a multiple of batch.per_class={batch.per_class}: change one")
    return PKSampler(images.labels, batch.size // batch.per_class, batch.per_class, config.seed)


def model_of(config: Config) -> EmbeddingModel:
    channels = 1 if config.model.trunk == "small" else 3
    model = build_model(config.model.trunk, config.model.dim, config.model.pooling, config.model.weights, channels)
    if config.model.freeze_batch_norm:
        freeze_batch_norm(model)
    return model


def override_weights(config: Config) -> Config:
    """The config of a model whose weights come from a checkpoint."""
    return replace(config, model=replace(config.model, weights="none"))


def loss_of(config: Config) -> PairLoss:
    loss = config.loss
    if loss.name not in LOSSES:
        raise unknown("loss", loss.name, LOSSES)
    try:
        made = LOSSES[loss.name](**loss.options, reduction=loss.reduction, exclude=loss.exclude)
    except TypeError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"loss.options={loss.options} do not fit the {loss.name} loss ({error})") from None
    assert isinstance(made, nn.Module)
    return made  # type: ignore[return-value]


def memory_of(config: Config, images: int) -> CrossBatchMemory | None:
    memory = config.memory
    if memory.ratio == 0:
        return None
    if memory.ratio < 0:
        raise InputError(f"memory.ratio={memory.ratio} must be 0 (no memory) or above")
    if memory.dtype not in DTYPES:
        raise unknown("memory.dtype", memory.dtype, DTYPES)
    size = round(memory.ratio * images)  # M = R_M · N
    if memory.update != "queue":
        if memory.ratio != 1:
            raise InputError(f"memory.update={memory.update} keeps one slot an image: memory.ratio must be 1")
        size = images
    return CrossBatchMemory(
        max(1, size), config.model.dim, memory.update, dtype=DTYPES[memory.dtype], momentum=memory.momentum, alpha=memory.alpha
    )
