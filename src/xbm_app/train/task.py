"""From a config to what the loop needs: feeds, sampler, model, loss, memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from xbm.distributed import ReplicatedMemory, ShardedMemory
from xbm.errors import InputError, unknown
from xbm.losses import LOSSES, REDUCTIONS, PairLoss
from xbm.memory import UPDATES, CrossBatchMemory
from xbm_app.data.feeds import DecodeFeed, Feed, ResidentFeed, StoreFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import PKSampler, ShuffleSampler
from xbm_app.data.transforms import Augmentation
from xbm_app.models import EmbeddingModel, build_model, freeze_batch_norm
from xbm_app.train.config import Config, Memory
from xbm_app.train.dataset import store_of
from xbm_app.train.watch import Watch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DOUBTS = ("keep", "skip")
HALF = (torch.bfloat16, torch.float16)
MOST_IN_HALF = 0.95  # momentum: of a slower average a visit moves rows of 16 bits by less than they can tell
SPREADS: dict[str, Any] = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}
KINDS = {"paper": "crop", "official": "resized_crop", "shift": "shift", "none": "none"}
EMBEDDED = 256  # images at once when a set is embedded; scores are bit for bit the same only for the same number
ANY_TRUNK = 64  # pixels: images of this side are large enough for each
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
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # every backend has its own
        raise InputError(f"device {name} cannot be used on this machine: use auto, cpu or cuda") from None
    return device


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
    how = config.data.feed
    store = None if config.data.store is None else store_of(images, config.data)
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


def sampler_of(images: ImageSet, config: Config, rank: int = 0, world: int = 1) -> PKSampler | ShuffleSampler:
    batch = config.batch
    if batch.sampler == "shuffle":
        return ShuffleSampler(len(images), batch.size, config.seed, rank, world)
    if batch.sampler != "pk":
        raise unknown("batch.sampler", batch.sampler, ["pk", "shuffle"])
    if batch.size % batch.per_class:
        raise InputError(f"batch.size={batch.size} is not a multiple of batch.per_class={batch.per_class}: change one")
    return PKSampler(images.labels, batch.size // batch.per_class, batch.per_class, config.seed, rank, world)


def model_of(config: Config) -> EmbeddingModel:
    channels = 1 if config.model.trunk == "small" else 3
    model = build_model(config.model.trunk, config.model.dim, config.model.pooling, config.model.weights, channels)
    _check_crop(model, config, channels)
    if config.model.freeze_batch_norm:
        freeze_batch_norm(model)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _check_crop(model: EmbeddingModel, config: Config, channels: int) -> None:
    """Refuses images of which the trunk leaves nothing."""
    crop = config.data.crop
    if crop >= ANY_TRUNK:
        return
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, crop, crop))
    except RuntimeError:
        raise InputError(f"data.crop={crop} is too small for {config.model.trunk}: give a larger data.crop") from None
    model.train(was_training)


def override_weights(config: Config) -> Config:
    """The config of a model whose weights come from a checkpoint."""
    return replace(config, model=replace(config.model, weights="none"))


def loss_of(config: Config, reduction: str | None = None) -> PairLoss:
    """The loss in the batch or, with the `reduction` of that, the one against the memory."""
    loss = config.loss
    if loss.name not in LOSSES:
        raise unknown("loss", loss.name, LOSSES)
    try:
        made = LOSSES[loss.name](**loss.options, reduction=reduction or loss.reduction, exclude=loss.exclude)
    except TypeError as error:
        if isinstance(error, InputError):
            raise
        known = getattr(LOSSES[loss.name], "hyperparameters", ())
        raise InputError(f"loss.options={loss.options} do not fit the {loss.name} loss: it takes {', '.join(known)}") from None
    assert isinstance(made, nn.Module)
    return made  # type: ignore[return-value]


def watch_of(
    config: Config, memory: CrossBatchMemory | ReplicatedMemory | ShardedMemory | None, labels: Sequence[int] | np.ndarray
) -> Watch:
    """What watches a run with these training labels: it knows what the config has already, and what it cannot have."""
    if memory is None:
        return Watch(config.optim.iterations)
    by_number = config.loss.name in ("contrastive", "margin")
    remedies = []
    if by_number and config.reduction != "balanced":
        remedies.append("memory.reduction=balanced")
    if not config.memory.batch_weight:
        remedies.append("memory.batch_weight=1")
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    rows_per_step = config.batch.size * config.batch.accumulate * config.memory.updates_per_step
    return Watch(
        config.memory.start,
        by_number and config.reduction == "sum",
        memory.size / rows_per_step / 2,
        tuple(remedies),
        smaller=("a smaller memory.ratio",) if config.memory.update == "queue" else (),  # a slot an image has one size
        larger=("a larger memory.ratio",) if config.memory.ratio < 1 else (),
        negatives=len(sizes) > 1,
        positives=bool((sizes > 1).any()),
    )


def _check_names(memory: Memory) -> None:
    for name, value, known in (
        ("memory.update", memory.update, UPDATES),
        ("memory.reduction", memory.reduction, REDUCTIONS),
        ("memory.spread", memory.spread, SPREADS),
        ("memory.dtype", memory.dtype, ["auto", *DTYPES]),
        ("memory.doubt", memory.doubt, DOUBTS),
    ):
        if value is not None and value not in known:
            raise unknown(name, value, known)


def _check_memory(config: Config, world: int) -> None:
    """Refuses what does not go together, and says what does."""
    memory = config.memory
    if memory.update != "queue" and memory.ratio != 1:
        raise InputError(
            f"memory.update={memory.update} keeps one slot an image: memory.ratio must be 1, "
            "or set memory.update=queue and memory.doubt=keep"
        )
    if memory.doubt == "skip" and memory.update == "queue":
        raise InputError(
            "memory.doubt=skip judges an image by its own row, and a queue has none for each: set memory.doubt=keep, "
            "or memory.update=moving_average"
        )
    if memory.doubt == "skip" and memory.spread == "sharded" and world > 1:
        raise InputError(
            "memory.doubt=skip compares all rows, and a sharded memory has a part on each process: set "
            "memory.doubt=keep, or memory.spread=replicated"
        )
    slow = memory.update == "backprop" or (memory.update == "moving_average" and (memory.momentum or 0) > MOST_IN_HALF)
    if slow and DTYPES.get(memory.dtype) in HALF:
        how = memory.update if memory.update == "backprop" else f"{memory.update} with memory.momentum={memory.momentum}"
        raise InputError(
            f"memory.update={how} moves rows by less than memory.dtype={memory.dtype} can tell: set memory.dtype=float32"
        )


def memory_of(
    config: Config, images: int, device: torch.device, world: int = 1
) -> CrossBatchMemory | ReplicatedMemory | ShardedMemory | None:
    memory = config.memory
    _check_names(memory)
    if memory.ratio == 0:
        return None
    _check_memory(config, world)
    auto = torch.bfloat16 if device.type == "cuda" and memory.update == "queue" else torch.float32
    size = round(memory.ratio * images)  # M = R_M · N; a slot an image where R_M must be 1
    kind = SPREADS[memory.spread] if world > 1 else CrossBatchMemory
    return kind(
        max(1, size),
        config.model.dim,
        memory.update,
        dtype=DTYPES.get(memory.dtype, auto),
        momentum=memory.momentum,
        alpha=memory.alpha,
    )
