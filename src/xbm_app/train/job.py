"""Everything a training run holds while it runs: built from a config, saved to and restored from one checkpoint."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xbm.distributed import GlobalLoss, the_ranks
from xbm.errors import InputError, unknown
from xbm.memory import CrossBatchMemory, statistics_kept
from xbm_app.data.feeds import Batches, Feed
from xbm_app.data.images import Dataset, ImageSet
from xbm_app.data.parallel import in_order
from xbm_app.models import parameter_groups
from xbm_app.models.fused import fuse
from xbm_app.models.sync_batch_norm import synchronise
from xbm_app.train import task
from xbm_app.train.checkpoint import read_checkpoint, write_checkpoint
from xbm_app.train.config import Config, flat, from_dict, to_dict
from xbm_app.train.cuda_graphs import Replayed
from xbm_app.train.feature_drift import Drift
from xbm_app.train.label_errors import aside, set_aside
from xbm_app.train.share import share_gradients

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, ids
Tracker = Callable[[Iterator[Batch], str, int], Generator[Batch, None, None]]  # passes on, and shows how far along they are
TALLY = ("loss", "batch_loss", "memory_loss", "valid_negatives_batch", "valid_negatives_memory", "valid_positives_memory")
COUNTS = slice(3, None)  # those of them that count pairs
LONG = 10_000  # iterations from which it pays to let cuDNN try every way to do each convolution
LOOK, COMPARED = 10, 1_000_000  # steps between two looks at labels: at least, and rows × classes for each; a pass at most
PROBES = 32  # images whose drift is watched
# between a run and its resume
MAY_CHANGE = {"device", "data.root", "data.store", "data.feed", "optim.iterations", "log.checkpoint_every", "log.wandb"}


class Iteration(NamedTuple):
    """What one optimizer step sees: usually one batch of anchors and nothing extra."""

    step: int
    extra: list[Batch]  # only enqueued: the ×n update
    anchors: list[Batch]  # compared with the memory; several when gradients are accumulated


class Job:
    """Model, optimizer, memory and the rest of a run's state; `iterations` yields its data from any step on."""

    def __init__(self, config: Config, dataset: Dataset, folder: Path) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.ranks = the_ranks()
        self.device = task.pick_device(config.device)
        torch.manual_seed(config.seed)
        self.model = task.model_of(config).to(self.device)
        if self.ranks.world > 1:
            synchronise(self.model, self.ranks)
        elif self.device.type == "cuda":
            fuse(self.model)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = config.optim.iterations >= LONG
        world = self.ranks.world
        losses = task.loss_of(config), task.loss_of(config, config.reduction)
        self.loss_fn, self.memory_loss_fn = (GlobalLoss(loss, self.ranks) if world > 1 else loss for loss in losses)
        memory = task.memory_of(config, len(dataset.train), self.device, world)
        self.memory = memory.to(self.device) if memory is not None else None
        self.doubting = memory if config.memory.doubt == "skip" and isinstance(memory, CrossBatchMemory) else None
        self.augmentation = task.augmentation_of(config, self.model)
        self.feed = task.feed_of(dataset.train, config, self.augmentation, self.device)
        self._test_feeds: dict[int, Feed] = {}  # by the set's `id`
        self.sampler = task.sampler_of(dataset.train, config, self.ranks.rank, world)

        optim = config.optim
        groups = parameter_groups(self.model, optim.lr, config.model.trunk_lr)
        self.optimizer = torch.optim.Adam(groups, lr=optim.lr, weight_decay=optim.weight_decay)
        self._base = [group["lr"] for group in self.optimizer.param_groups]
        self._suit_device()
        if optim.schedule not in ("step", "plateau"):
            raise unknown("optim.schedule", optim.schedule, ["step", "plateau"])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.1, patience=5)
        self.precision = self._precision(optim.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)

        probes = np.linspace(0, len(dataset.train) - 1, min(PROBES, len(dataset.train))).astype(np.int64)
        images = self.feed.test(probes).to(self.device)
        every = config.log.every * math.ceil(10 / config.log.every)  # a line of metrics is then due whenever drift is
        self.drift = Drift(images, config.model.dim, every).to(self.device)
        self.probed = Replayed(self.model)  # in eval mode, in full precision
        self.watch = task.watch_of(config, memory, dataset.train.labels)
        self.tally = torch.zeros(len(TALLY), dtype=torch.float64, device=self.device)  # sums since the last line of metrics
        self.tallied = 0
        self.best = -1.0
        self._own_randomness(0)

    @property
    def where(self) -> str:
        return str(self.device) if self.ranks.world == 1 else f"{self.device.type}, {self.ranks.world} processes"

    @property
    def about(self) -> str:
        train, query = self.dataset.train, self.dataset.protocols[0].query
        trained = f"{self.config.data.name}: {len(train)} images of {train.num_classes} classes on {self.where}"
        return f"{trained}; {len(query)} of {query.num_classes} classes to test on"

    def _precision(self, name: str) -> torch.dtype:
        known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if name == "auto":
            return torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if name not in known:
            raise unknown("optim.precision", name, ["auto", *known])
        return known[name]

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    # ---------------------------------------------------------------- data

    @property
    def batches_per_step(self) -> int:
        updates = self.config.memory.updates_per_step if self.memory is not None else 1
        return updates * self.config.batch.accumulate

    def iterations(self, start: int) -> Iterator[Iteration]:
        """From iteration `start` to the last: batches are a function of (seed, step), so any start is exact."""
        each = self.batches_per_step
        batches = Batches(self.feed, self.sampler, start * each, self.config.optim.iterations * each, device=self.device)
        made: list[Batch] = []
        for tick, images, labels, ids in batches:
            made.append((images, labels, ids))
            if len(made) == each:
                yield self.iteration(tick // each, made)
                made = []

    def iteration(self, step: int, batches: list[Batch]) -> Iteration:
        """Which of a step's batches are anchors: the last of every n, where the memory gets n batches for one compared."""
        n = len(batches) // self.config.batch.accumulate
        return Iteration(step, [each for k, each in enumerate(batches) if k % n != n - 1], batches[n - 1 :: n])

    def test_feed(self, images: ImageSet) -> Feed:
        """How the images of a set to score reach the model; loaded once where a run is scored again and again."""
        if id(images) in self._test_feeds:
            return self._test_feeds[id(images)]
        feed = task.feed_of(images, self.config, self.augmentation, self.device)
        if self.config.log.evaluate_every:
            self._test_feeds[id(images)] = feed
        return feed

    def random_parts(self) -> list[np.ndarray]:
        """What the memory is filled from: the training images once, in random order, but no more than the run trains on."""
        size = self.config.batch.size
        order = np.random.default_rng([self.config.seed, 1]).permutation(len(self.dataset.train))
        order = order[: size * self.config.optim.iterations]
        parts = np.array_split(order, math.ceil(len(order) / size))  # of equal size: batch norm cannot do with a single image
        return [np.array_split(part, self.ranks.world)[self.ranks.rank] for part in parts]

    def random_images(self, parts: list[np.ndarray]) -> Iterator[Batch]:
        """The images of these parts, in views that training never shows."""
        calls = (partial(self.feed.train, indices, -1 - k) for k, indices in enumerate(parts))
        for indices, images in zip(parts, in_order(calls, self.feed.workers, ahead=self.feed.workers + 1)):
            ids = self.feed.ids(indices).to(self.device)
            yield images.to(self.device), self.feed.labels.to(self.device)[ids], ids

    # ---------------------------------------------------------------- steps

    def start_memory(self, track: Tracker) -> None:
        """Initialises the memory with the warm model, unless the recipe leaves it empty."""
        if self.memory is None or not self.config.memory.fill:
            return
        alone = self.ranks.world == 1  # several ranks talk within a pass, about batch norm: that is not recorded
        parts = self.random_parts()
        images = track(self.random_images(parts), "filling the memory, every image once", len(parts))
        with self.autocast(), closing(images):
            self.memory.fill(Replayed(self.model) if alone else self.model, images)

    def doubt_labels(self, done: int) -> None:
        """Every few steps: rows whose labels the rest of the memory contradicts are set aside, where the recipe doubts."""
        if self.doubting is None:
            return
        images, classes = len(self.dataset.train), self.dataset.train.num_classes
        a_pass = images // self.config.batch.size
        if done % max(LOOK, min(images * classes // COMPARED, a_pass)) == 0:
            set_aside(self.doubting, classes)

    def learning(self, anchors: Tensor, ids: Tensor) -> Tensor:
        """The anchors, without gradient those whose rows are set aside: they learn nothing from labels that are in doubt."""
        if self.doubting is None:
            return anchors
        return torch.where(aside(self.doubting, ids)[:, None], anchors.detach(), anchors)

    @torch.no_grad()
    def enqueue_extra(self, batches: list[Batch]) -> None:
        """The ×n update: more batches into the memory, without gradient and without a trace in the model."""
        if not batches or self.memory is None:
            return
        with statistics_kept(self.model), self.autocast():
            for images, labels, ids in batches:
                self.memory.enqueue(self.model(images), labels, ids)

    def set_learning_rate(self, step: int) -> None:
        if self.config.optim.schedule == "step":
            factor = 0.1 ** sum(step >= at for at in self.config.optim.decay_at)
            for group, base in zip(self.optimizer.param_groups, self._base):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * factor)
                else:
                    group["lr"] = base * factor

    def learning_rate(self) -> float:
        """The head's. Waits for the device."""
        return float(self.optimizer.param_groups[-1]["lr"])

    def _suit_device(self) -> None:
        """On a GPU the optimizer is one kernel, and its learning rates lie there for recorded steps to read."""
        on_gpu = self.device.type == "cuda"
        for group in self.optimizer.param_groups:
            group["fused"] = group["capturable"] = on_gpu
            group["lr"] = torch.tensor(float(group["lr"]), device=self.device) if on_gpu else float(group["lr"])
        for state in self.optimizer.state.values():
            state["step"] = state["step"].to(self.device)

    def heed(self, loss: float) -> None:
        """Lowers the learning rate when the mean loss of the last lines stalls, where the schedule is `plateau`.

        While the memory fills, every line adds pairs and the loss can only grow: that is no plateau.
        """
        if self.config.optim.schedule == "plateau" and (self.memory is None or self.memory.is_full):
            self.plateau.step(loss)

    def update(self) -> None:
        """The optimizer's step, and the memory's own where it has one."""
        share_gradients(self.model, self.ranks)
        self.scaler.unscale_(self.optimizer)
        if self.memory is not None and self.memory.rows.grad is not None and self.scaler.is_enabled():
            self.memory.rows.grad /= self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.memory is not None:
            self.memory.step()

    def drop_gradients(self) -> None:
        """Forgets what a step that was not finished has left."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.memory is not None:
            self.memory.rows.grad = None

    @torch.no_grad()
    def probe(self) -> Tensor:
        """(n, D): embeddings of the images whose drift is watched: a model that cannot embed them has diverged."""
        self.model.eval()
        probed = self.probed(self.drift.images)
        self.model.train()
        return probed

    def tally_of_all(self) -> Tensor:
        """The sums since the last line of metrics: losses are of the global batch already, counts of a rank's own anchors."""
        total = self.tally.clone()
        total[COUNTS] = self.ranks.sum(total[COUNTS], "metrics")
        return total

    # ---------------------------------------------------------------- state

    def _own_randomness(self, step: int) -> None:
        """Ranks draw differently, where a model draws at all (dropout)."""
        if not self.ranks.first:
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank + step)

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.pt"

    def save(self, step: int, path: Path | None = None) -> None:
        """Everything that a bit-for-bit resume from iteration `step` needs."""
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
            "watch": self.watch.state_dict(),
            "tally": self.tally_of_all(),
            "tallied": self.tallied,
            "best": self.best,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        if self.ranks.first:
            write_checkpoint(path or self.last, state)

    def _same_run(self, state: dict) -> None:
        """Refuses a checkpoint of other data or other settings: what follows would be neither run."""
        images, classes = len(self.dataset.train), self._class_names()
        if (state["images"], state["classes"]) != (images, classes):
            raise InputError(
                f"this run was trained on {state['images']} images of {len(state['classes'])} classes and there are {images} "
                f"of {len(classes)} now, or others: restore the data, or start a new run"
            )
        before, now = flat(from_dict(state["config"])), flat(self.config)
        for name in before:
            if before[name] != now[name] and name not in MAY_CHANGE:
                raise InputError(
                    f"{name} was {before[name]} in this run and is {now[name]} now: put it back, or start a new run"
                )

    def _class_names(self) -> list[str]:
        return [str(name) for name in self.dataset.train.class_names]

    def restore(self) -> int:
        """Loads the last checkpoint and returns the iteration to go on with."""
        state = read_checkpoint(self.last, self.device)
        self._same_run(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._suit_device()
        self.plateau.load_state_dict(state["plateau"])
        self.scaler.load_state_dict(state["scaler"])
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
        self.drift.load_state_dict(state["drift"])
        self.watch.load_state_dict(state["watch"])
        self.tally.copy_(state["tally"])
        if not self.ranks.first:
            self.tally[COUNTS] = 0
        self.tallied, self.best = state["tallied"], state["best"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)
        self._own_randomness(int(state["step"]))
        return int(state["step"])


def _plain(state: dict) -> dict:
    """Only what a checkpoint read without code may hold."""
    return {key: value for key, value in state.items() if isinstance(value, int | float | str | bool | list | type(None))}
