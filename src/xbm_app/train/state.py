"""What a training run consists of: built from its config, saved to and restored from one checkpoint."""

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xbm.distributed import GlobalLoss, ReplicatedMemory, ShardedMemory, the_ranks
from xbm.errors import InputError, unknown
from xbm.losses import LOSSES, REDUCTIONS, PairLoss
from xbm.memory import UPDATES, CrossBatchMemory
from xbm_app.data.feeds import Feed
from xbm_app.data.images import Dataset
from xbm_app.files import read_checkpoint, write_checkpoint
from xbm_app.models import EmbeddingModel, build_model, freeze_batch_norm, parameter_groups
from xbm_app.models.fused import fuse
from xbm_app.models.sync_batch_norm import synchronise
from xbm_app.train.config import Config, Memory, flat, from_dict, to_dict
from xbm_app.train.cuda_graphs import Replayed
from xbm_app.train.dataset import TrainingData, augmentation_of
from xbm_app.train.feature_drift import Drift
from xbm_app.train.metrics import watcher_of

AnyMemory = CrossBatchMemory | ReplicatedMemory | ShardedMemory

SUMS = ("loss", "batch_loss", "memory_loss", "valid_negatives_batch", "valid_negatives_memory", "valid_positives_memory")
COUNTS = slice(3, None)  # those of them that count pairs
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LAYOUTS: dict[str, Any] = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}  # of memory.spread
LARGEST_MOMENTUM = 0.95  # in 16 bits: a slower average would move rows by less than these can represent
ANY_TRUNK = 64  # pixels: images of this side are large enough for every trunk
LONG_RUN = 10_000  # iterations from which cuDNN's search for the fastest convolutions pays off
PROBES = 32  # images whose drift is measured
CHECK_STEPS, CHECK_PAIRS = 10, 1_000_000  # between two checks of the labels: steps at least, rows × classes per step
# settings that may differ between a run and its resumption
MAY_CHANGE = {"device", "data.root", "data.store", "data.feed", "optim.iterations", "log.checkpoint_every", "log.wandb"}


class RunState:
    """The objects of a training run. What changes during training is in its checkpoint.

    Attributes:
        data: delivers batches.
        loss_fn, memory_loss_fn: the loss within a batch, and against the memory.
        memory: None in a run without memory.
        label_memory: the memory, if it is searched for label errors, every `label_check_every` steps; otherwise None.
        sums: (len(SUMS),), sums over the `summed` batches since the last row of metrics.
        best: the best R@1 on held-out classes so far; -1 before the first.
    """

    def __init__(self, config: Config, dataset: Dataset, folder: Path) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.ranks = ranks = the_ranks()
        self.test_feeds: dict[int, Feed] = {}  # by the `id` of the set that is scored
        self.device = device = pick_device(config.device)
        on_gpu, several = device.type == "cuda", ranks.world > 1
        torch.manual_seed(config.seed)
        self.model = model_of(config).to(device)
        if several:
            synchronise(self.model, ranks)
        elif on_gpu:
            fuse(self.model)
        if on_gpu:
            torch.backends.cudnn.benchmark = config.optim.iterations >= LONG_RUN
        losses = loss_of(config), loss_of(config, config.reduction)
        self.loss_fn, self.memory_loss_fn = (GlobalLoss(loss, ranks) if several else loss for loss in losses)
        memory = memory_of(config, len(dataset.train), device, ranks.world)
        self.memory = None if memory is None else memory.to(device)
        skip = config.memory.doubt == "skip"
        self.label_memory = memory if skip and isinstance(memory, CrossBatchMemory) else None
        self.label_check_every = 0 if self.label_memory is None else _label_check_every(config, dataset)
        self.augmentation = augmentation_of(config, self.model)
        self.data = TrainingData(config, dataset.train, self.augmentation, device, ranks)

        groups = parameter_groups(self.model, config.optim.lr, config.model.trunk_lr)
        self.optimizer = torch.optim.Adam(groups, lr=config.optim.lr, weight_decay=config.optim.weight_decay)
        self._initial_rates = [group["lr"] for group in self.optimizer.param_groups]
        _prepare_optimizer(self.optimizer, device)
        if config.optim.schedule not in ("step", "plateau"):
            raise unknown("optim.schedule", config.optim.schedule, ["step", "plateau"])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.1, patience=5)
        precision = _precision(config.optim.precision, device)
        self.autocast = torch.autocast(device.type, precision, enabled=precision != torch.float32)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)

        probes = np.linspace(0, len(dataset.train) - 1, min(PROBES, len(dataset.train))).astype(np.int64)
        every = config.log.every * math.ceil(10 / config.log.every)  # drift is measured only where a row of metrics is due
        self.drift = Drift(self.data.feed.test(probes).to(device), config.model.dim, every).to(device)
        self.probe_model = Replayed(self.model)  # for the drift: in eval mode and full precision
        self.watcher = watcher_of(config, 0 if memory is None else memory.size, dataset.train.labels)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.summed = 0
        self.best = -1.0
        self._seed_rank(0)

    @property
    def last(self) -> Path:
        """The checkpoint that a resumption starts from."""
        return self.folder / "checkpoints" / "last.pt"

    @property
    def chosen(self) -> Path:
        """The checkpoint of the best score on held-out classes (`log.evaluate_every`)."""
        return self.folder / "checkpoints" / "best.pt"

    def set_learning_rate(self, step: int) -> None:
        """Applies the schedule `step`; under `plateau` the loss decides."""
        if self.config.optim.schedule != "step":
            return
        factor = 0.1 ** sum(step >= decay for decay in self.config.optim.decay_at)
        for group, rate in zip(self.optimizer.param_groups, self._initial_rates):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def global_sums(self) -> Tensor:
        """`sums` over all ranks: losses are those of the global batch already, counts are of a rank's own anchors."""
        total = self.sums.clone()
        total[COUNTS] = self.ranks.sum(total[COUNTS], "metrics")
        return total

    def save(self, step: int, path: Path) -> None:
        """Writes everything that a bit-for-bit resumption at iteration `step` needs."""
        state = {
            "step": step,
            "config": to_dict(self.config),
            "classes": self._class_names(),
            "images": len(self.dataset.train),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "plateau": _plain(self.plateau.state_dict()),
            "scaler": self.scaler.state_dict(),
            "memory": None if self.memory is None else self.memory.state_dict(),
            "drift": self.drift.state_dict(),
            "watch": self.watcher.state_dict(),
            "tally": self.global_sums(),
            "tallied": self.summed,
            "best": self.best,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        if self.ranks.first:
            write_checkpoint(path, state)

    def restore(self) -> int:
        """Loads the last checkpoint and returns the iteration to continue with."""
        state = read_checkpoint(self.last, self.device)
        self._check_same_run(state)
        self.load_weights(state)
        self.optimizer.load_state_dict(state["optimizer"])
        _prepare_optimizer(self.optimizer, self.device)
        self.plateau.load_state_dict(state["plateau"])
        self.scaler.load_state_dict(state["scaler"])
        self.drift.load_state_dict(state["drift"])
        self.watcher.load_state_dict(state["watch"])
        self.sums.copy_(state["tally"])
        if not self.ranks.first:
            self.sums[COUNTS] = 0
        self.summed, self.best = state["tallied"], state["best"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)
        self._seed_rank(int(state["step"]))
        return int(state["step"])

    def load_weights(self, state: dict[str, Any]) -> None:
        """Loads the model and the memory of a checkpoint."""
        self.model.load_state_dict(state["model"])
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])

    def _check_same_run(self, state: dict[str, Any]) -> None:
        images, classes = len(self.dataset.train), self._class_names()
        if (state["images"], state["classes"]) != (images, classes):
            raise InputError(
                f"this run was trained on {state['images']} images of {len(state['classes'])} classes, but the data now has "
                f"{images} images of {len(classes)} classes, or different ones: restore the data, or start a new run"
            )
        before, now = flat(from_dict(state["config"])), flat(self.config)
        for name in before:
            if before[name] != now[name] and name not in MAY_CHANGE:
                raise InputError(f"{name} was {before[name]} in this run and is {now[name]} now: revert it, or start a new run")

    def _class_names(self) -> list[str]:
        return [str(name) for name in self.dataset.train.class_names]

    def _seed_rank(self, step: int) -> None:
        """Makes the ranks draw different random numbers, where a model draws any (dropout)."""
        if not self.ranks.first:
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank + step)


def _plain(state: dict) -> dict:
    """Drops values that a checkpoint, which is read without running code, cannot hold."""
    return {key: value for key, value in state.items() if isinstance(value, int | float | str | bool | list | type(None))}


def _prepare_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """On a GPU, fuses the optimizer and keeps its learning rates there, where recorded CUDA graphs read them."""
    on_gpu = device.type == "cuda"
    for group in optimizer.param_groups:
        group["fused"] = group["capturable"] = on_gpu
        group["lr"] = torch.tensor(float(group["lr"]), device=device) if on_gpu else float(group["lr"])
    for state in optimizer.state.values():
        state["step"] = state["step"].to(device)


def _precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in PRECISIONS:
        raise unknown("optim.precision", name, ["auto", *PRECISIONS])
    return PRECISIONS[name]


def _label_check_every(config: Config, dataset: Dataset) -> int:
    images, epoch = len(dataset.train), len(dataset.train) // config.batch.size
    return max(CHECK_STEPS, min(images * dataset.train.num_classes // CHECK_PAIRS, epoch))


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} does not exist: use auto, cpu or cuda") from None
    if device.type == "cpu":
        return device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda is not available, no GPU is visible: use device=cpu, or check the driver")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or device.type != accelerator.type or (device.index or 0) >= torch.accelerator.device_count():
        raise InputError(f"device {name} is not available on this machine: use auto, cpu or cuda")
    return device


def model_of(config: Config) -> EmbeddingModel:
    channels = 1 if config.model.trunk == "small" else 3
    model = build_model(config.model.trunk, config.model.dim, config.model.pooling, config.model.weights, channels)
    if config.data.crop < ANY_TRUNK:
        _check_crop(model, config, channels)
    if config.model.freeze_batch_norm:
        freeze_batch_norm(model)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _check_crop(model: nn.Module, config: Config, channels: int) -> None:
    """Refuses images so small that nothing is left of them within the trunk."""
    crop, shapes = config.data.crop, copy.deepcopy(model).to("meta").eval()  # without values, only shapes can be wrong
    try:
        with torch.no_grad():
            shapes(torch.zeros(1, channels, crop, crop, device="meta"))
    except RuntimeError as error:
        raise InputError(f"data.crop={crop} is too small for {config.model.trunk}: use a larger data.crop") from error


def loss_of(config: Config, reduction: str | None = None) -> PairLoss:
    """The loss within a batch, or with another `reduction` the one against the memory."""
    loss = config.loss
    if loss.name not in LOSSES:
        raise unknown("loss", loss.name, LOSSES)
    options = set(inspect.signature(LOSSES[loss.name]).parameters) - {"reduction", "engine", "exclude"}
    for name in loss.options:
        if name not in options:
            raise unknown(f"option of the {loss.name} loss", name, options)
    return LOSSES[loss.name](**loss.options, reduction=reduction or loss.reduction, exclude=loss.exclude)  # type: ignore[arg-type]


def memory_of(config: Config, images: int, device: torch.device, world: int = 1) -> AnyMemory | None:
    memory = config.memory
    for name, known in (
        ("update", UPDATES), ("reduction", REDUCTIONS), ("spread", LAYOUTS), ("dtype", ["auto", *DTYPES]),
        ("doubt", ["keep", "skip"]),
    ):  # fmt: skip
        value = getattr(memory, name)
        if value is not None and value not in known:
            raise unknown(f"memory.{name}", value, known)
    if memory.ratio == 0:
        return None
    _check_memory(memory, world)
    auto = torch.bfloat16 if device.type == "cuda" and memory.update == "queue" else torch.float32
    kind = LAYOUTS[memory.spread] if world > 1 else CrossBatchMemory
    return kind(
        max(1, round(memory.ratio * images)),  # M = R_M · N
        config.model.dim,
        memory.update,
        dtype=DTYPES.get(memory.dtype, auto),
        momentum=memory.momentum,
        alpha=memory.alpha,
    )


def _check_memory(memory: Memory, world: int) -> None:
    """Refuses settings that do not go together."""
    if memory.update != "queue" and memory.ratio != 1:
        raise InputError(
            f"memory.update={memory.update} keeps one slot per image: set memory.ratio=1, "
            "or memory.update=queue and memory.doubt=keep"
        )
    if memory.doubt == "skip" and memory.update == "queue":
        raise InputError(
            "memory.doubt=skip needs one slot per image, which a queue does not have: set memory.doubt=keep, "
            "or memory.update=moving_average"
        )
    if memory.doubt == "skip" and memory.spread == "sharded" and world > 1:
        raise InputError(
            "memory.doubt=skip compares all rows, but each process holds only a part of a sharded memory: set "
            "memory.doubt=keep, or memory.spread=replicated"
        )
    slow = memory.update == "backprop" or (memory.update == "moving_average" and (memory.momentum or 0) > LARGEST_MOMENTUM)
    if slow and memory.dtype in ("bfloat16", "float16"):
        how = memory.update if memory.update == "backprop" else f"{memory.update} with memory.momentum={memory.momentum}"
        raise InputError(
            f"memory.update={how} moves rows by less than memory.dtype={memory.dtype} can represent: set memory.dtype=float32"
        )
