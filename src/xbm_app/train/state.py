"""What a training run consists of: built from its config and the caller's hooks, saved to and restored from one checkpoint."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xbm import MomentumEncoder
from xbm.distributed import GlobalLoss, ReplicatedMemory, ShardedMemory, the_ranks
from xbm.errors import InputError, unknown
from xbm.losses import REDUCTIONS, PairLoss
from xbm.memory import UPDATES, CrossBatchMemory
from xbm_app.data.feeds import FeatureFeed, Feed
from xbm_app.data.images import Dataset, ImageSet
from xbm_app.data.transforms import Transform, describe
from xbm_app.files import read_checkpoint, reading, write_checkpoint
from xbm_app.models.embedding import synchronise
from xbm_app.models.fused import fuse
from xbm_app.train.config import Config, Memory, flat, from_dict, to_dict
from xbm_app.train.cuda_graphs import Replayed
from xbm_app.train.dataset import SAMPLED, TrainingData, augmentation_of, feed_of, fingerprint
from xbm_app.train.losses import UncountedLoss, losses_of
from xbm_app.train.metrics import Drift, watcher_of
from xbm_app.train.optimization import AveragedWeights, optimizer_of, precision_of, prepare, rate_factor, set_rates
from xbm_app.train.run_model import FEATURES, features_of, model_of, prepare_trunk

AnyMemory = CrossBatchMemory | ReplicatedMemory | ShardedMemory
OnLog = Callable[[Mapping[str, float]], object]
OnEvaluate = Callable[[int, Mapping[str, float]], object]

SUMS = ("loss", "batch_loss", "memory_loss", "valid_negatives_batch", "valid_negatives_memory", "valid_positives_memory")
COUNTS = slice(3, None)  # those of them that count pairs
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LAYOUTS: dict[str, Any] = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}  # of memory.spread
LARGEST_MOMENTUM = 0.95  # in 16 bits: a slower average would move rows by less than these can represent
LONG_RUN = 10_000  # iterations from which cuDNN's search for the fastest convolutions pays off
PROBES = 32  # images whose drift is measured
CHECK_STEPS, CHECK_PAIRS = 10, 1_000_000  # between two checks of the labels: steps at least, rows × classes per step
# settings that may differ between a run and its resumption
MAY_CHANGE = {
    "device", "data.root", "data.store", "data.feed", "data.features", "optim.iterations", "log.checkpoint_every", "log.wandb",
    "log.trackers", "log.project",
}  # fmt: skip


@dataclass(frozen=True)
class Hooks:
    """What a Python program adds to a run: a transform of its own, and functions that are called during training.

    With several processes, only the first one calls `on_log` and `on_evaluate`.

    Attributes:
        transform: applied to every training image; `data.transform` in the config describes it.
        on_log: called with each row of metrics: "step", "loss", "lr", ...
        on_evaluate: called after each evaluation on held-out classes with the iterations so far and the scores.
    """

    transform: Transform | None = None
    on_log: OnLog | None = None
    on_evaluate: OnEvaluate | None = None

    @property
    def described(self) -> str | None:
        return None if self.transform is None else describe(self.transform)

    def check(self, config: Config) -> None:
        """Refuses another transform than that of the config, and one that would have no effect."""
        recorded, own = config.data.transform, self.described
        if recorded is not None and own is None:
            raise InputError(f"this run has a transform, {recorded}: pass it from Python, xbm.train(..., transform=...)")
        if recorded != own:
            raise InputError(f"this run has {recorded or 'no transform'}, the transform passed is {own}: pass the same one")
        if own is not None and config.model.freeze == "trunk":
            raise InputError(
                "a frozen trunk sees every image once, without augmentation: omit transform, or model.freeze=trunk"
            )


NO_HOOKS = Hooks()


class RunState:
    """The objects of a training run. What changes during training is in its checkpoint.

    Attributes:
        data: delivers batches.
        loss_fn, memory_loss_fn: the loss within a batch, and against the memory; with parameters of its own, the same object.
        memory: None in a run without memory.
        keys: the slow copy that embeds what is enqueued (`memory.keys`), or None.
        label_memory: the memory, if it is searched for label errors, every `label_check_every` steps; otherwise None.
        sums: (len(SUMS),), sums over the `summed` batches since the last row of metrics.
        average: the averaged weights (`optim.ema`), or None.
        best: the best MAP@R on held-out classes so far; -1 before the first.
    """

    def __init__(self, config: Config, dataset: Dataset, folder: Path, hooks: Hooks = NO_HOOKS) -> None:
        self.config, self.dataset, self.folder, self.hooks = config, dataset, folder, hooks
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
        torch.backends.cudnn.allow_tf32 = config.optim.precision != "fp32"  # torch's default rounds convolutions to 10 bits
        losses = losses_of(config, dataset.train.num_classes)
        self.loss_fn, self.memory_loss_fn = (self._of_all_ranks(loss) if several else loss.to(device) for loss in losses)
        memory = memory_of(config, len(dataset.train), device, ranks.world)
        self.memory = None if memory is None else memory.to(device)
        skip = config.memory.doubt == "skip"
        self.label_memory = memory if skip and isinstance(memory, CrossBatchMemory) else None
        self.label_check_every = 0 if self.label_memory is None else _label_check_every(config, dataset)
        self.keys = MomentumEncoder(self.model, config.memory.keys) if memory is not None and config.memory.keys else None
        self.augmentation = augmentation_of(config, self.model, hooks.transform)
        self.data = TrainingData(config, self.feed_of(dataset.train), dataset.train, device, ranks)
        prepare_trunk(self.model, config)

        self.optimizer = optimizer_of(config, self.model, self.loss_fn, device)
        self._initial_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.average = AveragedWeights(self.model, config.optim.ema) if config.optim.ema else None
        # of R@1 on the held-out classes, with the constants of the released code
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, mode="max", factor=0.1, patience=4, threshold=0.001, cooldown=2,
            min_lr=[rate / 20 for rate in self._initial_rates],
        )  # fmt: skip
        precision = precision_of(config.optim.precision, device)
        self.autocast = torch.autocast(device.type, precision, enabled=precision != torch.float32)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)

        probes = np.linspace(0, len(dataset.train) - 1, min(PROBES, len(dataset.train))).astype(np.int64)
        every = config.log.every * math.ceil(10 / config.log.every)  # drift is measured only where a row of metrics is due
        self.drift = Drift(self.data.feed.test(probes).to(device), config.model.dim, every).to(device)
        self.probe_model = Replayed(self.model)  # for the drift: in eval mode and full precision
        self.watcher = watcher_of(config, 0 if memory is None else memory.size, dataset.train.labels)
        exact = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.sums = torch.zeros(len(SUMS), dtype=exact, device=device)
        self.summed = 0
        self.best = -1.0
        self._seed_rank(0)

    def _of_all_ranks(self, loss: PairLoss | UncountedLoss) -> GlobalLoss:
        if isinstance(loss, UncountedLoss):
            raise InputError(f"{self.config.loss.name} sees only the batch of its own process: train it without torchrun")
        return GlobalLoss(loss, self.ranks)

    @property
    def counts_pairs(self) -> bool:
        """Whether the loss reports how many pairs were valid."""
        return not isinstance(self.loss_fn, UncountedLoss)

    @cached_property
    def data_fingerprint(self) -> dict[str, str]:
        return fingerprint(self.dataset.train)

    @property
    def last(self) -> Path:
        """The checkpoint that a resumption starts from."""
        return self.folder / "checkpoints" / "last.pt"

    @property
    def chosen(self) -> Path:
        """The checkpoint of the best score on held-out classes (`log.evaluate_every`)."""
        return self.folder / "checkpoints" / "best.pt"

    def set_learning_rate(self, step: int) -> None:
        """Applies the schedule; under `plateau` the held-out classes decide."""
        if self.config.optim.schedule != "plateau":
            set_rates(self.optimizer, self._initial_rates, rate_factor(self.config.optim, step))

    def feed_of(self, images: ImageSet) -> Feed:
        """What delivers a set to the model: its images, or their features if the trunk is frozen."""
        feed = feed_of(images, self.config, self.augmentation, self.device)
        if self.config.model.freeze != "trunk":
            return feed
        folder = self.folder / FEATURES if self.config.data.features is None else Path(self.config.data.features)
        features = features_of(self.model, images, feed, folder, self.device, self.ranks)
        return FeatureFeed(features, images.labels, self.augmentation, self.config.seed)

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
            "data": self.data_fingerprint,
            **({"model": self.model.state_dict()} if self.average is None else self.average.state_dict(self.model)),
            "loss": self.loss_fn.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "plateau": _plain(self.plateau.state_dict()),
            "scaler": self.scaler.state_dict(),
            "memory": None if self.memory is None else self.memory.state_dict(),
            "keys": None if self.keys is None else self.keys.state_dict(),
            "drift": self.drift.state_dict(),
            "watch": self.watcher.state_dict(),
            "tally": self.global_sums(),
            "tallied": self.summed,
            "best": self.best,
            "stream": self.data.stream_state(step),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        if self.ranks.first:
            write_checkpoint(path, state)

    def restore(self) -> int:
        """Loads the last checkpoint and returns the iteration to continue with."""
        state = read_checkpoint(self.last, self.device)
        with reading(self.last):
            return self._restore(state)

    def _restore(self, state: dict[str, Any]) -> int:
        self._check_same_run(state)
        self.load_weights(state)
        if self.average is not None:
            self.average.load_state_dict(self.model, state)
        self.loss_fn.load_state_dict(state.get("loss", {}))  # checkpoints of losses without parameters may lack it
        self.optimizer.load_state_dict(state["optimizer"])
        prepare(self.optimizer, self.device)
        self.plateau.load_state_dict(state["plateau"])
        self.scaler.load_state_dict(state["scaler"])
        if self.keys is not None:
            self.keys.load_state_dict(state["keys"])
        self.drift.load_state_dict(state["drift"])
        self.watcher.load_state_dict(state["watch"])
        self.sums.copy_(state["tally"])
        if not self.ranks.first:
            self.sums[COUNTS] = 0
        self.summed, self.best = state["tallied"], state["best"]
        self.data.load_stream_state(state.get("stream"))
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
        data, now_data = state.get("data"), self.data_fingerprint
        if data is not None:  # which older versions did not record
            same_source = data["source"] == now_data["source"]
            differ = [name for name in data.keys() & now_data.keys() if data[name] != now_data[name]]
            if "list" in differ or (same_source and not {"content", "store"}.isdisjoint(differ)):
                raise InputError(
                    "the training images, their labels or their boxes are not those that this run began with: restore the data "
                    "and split.csv, or start a new run"
                )
            if same_source and "times" in differ and self.ranks.first:
                warnings.warn(
                    f"the training images have other modification times than when the run began: their sizes and the bytes of "
                    f"{SAMPLED} of them are the same, the others were not compared",
                    stacklevel=1,
                )
        before, now = flat(from_dict(state["config"])), flat(self.config)
        fixed = {"optim.iterations"} if self.config.optim.schedule in ("cosine", "linear") else set()  # its end is the run's
        for name in before:
            if before[name] != now[name] and name not in MAY_CHANGE - fixed:
                raise InputError(f"{name} was {before[name]} in this run and is {now[name]} now: revert it, or start a new run")

    def _class_names(self) -> list[str]:
        return [str(name) for name in self.dataset.train.class_names]

    def _seed_rank(self, step: int) -> None:
        """Makes the ranks draw different random numbers, where a model draws any (dropout)."""
        if not self.ranks.first:
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank + step)


def keys_of(run: RunState, images: Tensor) -> Tensor:
    """(m, D): what the slow copy of the model makes of a batch."""
    assert run.keys is not None
    with run.autocast:
        return torch.cat([run.keys(part) for part in images.split(run.config.batch.chunk or len(images))])


def _plain(state: dict) -> dict:
    """Drops values that a checkpoint, which is read without running code, cannot hold."""
    return {key: value for key, value in state.items() if isinstance(value, int | float | str | bool | list | type(None))}


def _label_check_every(config: Config, dataset: Dataset) -> int:
    images, epoch = len(dataset.train), len(dataset.train) // config.batch.size
    return max(CHECK_STEPS, min(images * dataset.train.num_classes // CHECK_PAIRS, epoch))


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU if there is one, Apple's included."""
    if name == "auto":
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(found)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} does not exist: use auto, cpu, cuda or mps") from None
    if device.type == "cpu":
        return device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda is not available, no GPU is visible: use device=cpu, or check the driver")
    count = torch.accelerator.device_count()  # 0 without one; `current_accelerator` then names what torch was built for
    accelerator = torch.accelerator.current_accelerator() if count else None
    if accelerator is None or device.type != accelerator.type or (device.index or 0) >= count:
        raise InputError(f"device {name} is not available on this machine: use auto, cpu, cuda or mps")
    return device


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
        memory.size or max(1, round(memory.ratio * images)),  # M = R_M · N
        config.model.dim,
        memory.update,
        dtype=DTYPES.get(memory.dtype, auto),
        momentum=memory.momentum,
        alpha=memory.alpha,
    )


def _check_memory(memory: Memory, world: int) -> None:
    """Refuses settings that do not go together."""
    if memory.update != "queue" and (memory.ratio != 1 or memory.size is not None):
        raise InputError(
            f"memory.update={memory.update} keeps one slot per image: set memory.ratio=1 and remove memory.size, "
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
