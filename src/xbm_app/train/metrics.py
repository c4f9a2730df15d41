"""The metrics of a run: a CSV that resumes exactly, trackers, the feature drift, and warnings about what all of them show."""

import csv
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from xbm.errors import unknown
from xbm_app.extras import require
from xbm_app.files import reading, record_checksum, replacing, verify, write_bytes
from xbm_app.train.config import Config, flat, save, to_dict

COLUMNS = (
    "step", "loss", "batch_loss", "memory_loss", "lr", "valid_negatives_batch", "valid_negatives_memory",
    "valid_positives_memory", "mean_cosine", "effective_rank", "drift_10", "drift_100", "drift_1000", "recall@1",
    "map@r",
)  # fmt: skip
MLFLOW_RUN = "mlflow_run.txt"  # in the run folder: the identifier with which a resumed run continues
MLFLOW_TEXT = 500  # characters of a parameter that every MLflow server stores
STEPS = (10, 100, 1000)  # the Δt of the drift
COLLAPSED_COSINE = 0.98
COLLAPSED_RANK = 2.0
OUTWEIGHED = 3.0  # valid negatives of the memory per positive: summed, they cost R@1 (docs/robustness.md)
LARGE_DRIFT = 1.0  # squared distance: an image is then no nearer to its old row than the margin, S = 0.5


class Metrics:
    """Writes rows to `metrics.csv` and the trackers. Opening at `step` removes what a killed run wrote from there on."""

    def __init__(self, folder: Path, step: int, config: Config, writes: bool = True) -> None:
        self.writes = writes  # only one of several processes does
        if not writes:
            return
        save(config, folder / "config.yaml")
        self.path = folder / "metrics.csv"
        rows = [row for row in read_metrics(self.path) if row["step"] < step] if self.path.exists() else []
        with replacing(self.path, checksum=True) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([_text(row[name]) for name in COLUMNS] for row in rows)
        self._file = self.path.open("a", newline="")
        self._csv = csv.writer(self._file)
        self._trackers = open_trackers(config, folder, step)

    def write(self, row: dict[str, float], speed: float = math.nan) -> None:
        if not self.writes:
            return
        self._csv.writerow([_text(row.get(name, math.nan)) for name in COLUMNS])
        self._file.flush()
        step = int(row["step"])
        self._track({**row, "iterations_per_second": speed}, step)

    def finish(self, step: int, scores: Mapping[str, float]) -> None:
        """Sends the final scores to the trackers, as `test/recall@1` and so on."""
        if self.writes:
            self._track({f"test/{name}": value for name, value in scores.items()}, step)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        known = {name: value for name, value in values.items() if name != "step" and not math.isnan(value)}
        for tracker in self._trackers:
            tracker.log(known, step)

    def record(self) -> None:
        """Enters the rows so far in the checksums of the run folder."""
        if self.writes:
            os.fsync(self._file.fileno())
            record_checksum(self.path)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.writes:
            return
        # closing flushes buffers; on a full disk that fails once more, and the first error is the one to report
        with suppress(OSError) if kind is not None else nullcontext():
            if kind is None:
                self.record()
            self._file.close()
            for tracker in self._trackers:
                tracker.close(failed=kind is not None)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the rows of a metrics file, without a last line that a kill cut short. Columns missing in old files are NaN."""
    with reading(path), open(verify(path, growing=True), newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    rows = []
    for line in lines[1:]:
        if len(line) == len(lines[0]):
            try:
                values = {name: float(x) if x else math.nan for name, x in zip(lines[0], line)}
            except ValueError:
                continue
            rows.append({name: values.get(name, math.nan) for name in COLUMNS})
    return rows


def _text(value: float) -> str:
    if isinstance(value, float) and math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def metric_title(name: str) -> str:
    """A metric as tables write it: "recall@1" is "R@1", "map@r" is "MAP@R"."""
    if name in ("r_precision", "map"):
        return {"r_precision": "R-precision", "map": "mAP"}[name]
    return f"R@{name.removeprefix('recall@')}" if name.startswith("recall@") else name.upper()


def one_line(row: dict[str, float]) -> str:
    """The figures of a row that a person wants to see during training."""
    known = {name: value for name, value in row.items() if not math.isnan(value)}
    parts = [f"loss {row['loss']:.3g}"]
    if "valid_negatives_batch" in known:
        parts.append(f"negatives {known['valid_negatives_batch']:.0f} batch")
    if "valid_negatives_memory" in known:
        parts[-1] += f" / {known['valid_negatives_memory']:.0f} memory"
    drift = next((delta for delta in (1000, 100, 10) if f"drift_{delta}" in known), None)
    if drift is not None:
        parts.append(f"drift({drift}) {known[f'drift_{drift}']:.3f}")
    if "recall@1" in known:
        parts.append(f"R@1 {100 * known['recall@1']:.1f}")
    return " · ".join(parts)


def cosine_and_rank(anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean pairwise cosine of a batch (m, D) and its effective rank, e^entropy of the normalized spectrum. No host sync."""
    v = anchors.detach().float()
    m = len(v)
    gram = v @ v.T
    cosine = (gram.sum() - gram.diagonal().sum()) / max(1, m * (m - 1))
    spectrum = torch.linalg.eigvalsh(gram).clamp(min=0)
    share = spectrum / spectrum.sum().clamp(min=1e-12)
    rank = torch.exp(-(share * share.clamp(min=1e-12).log()).sum())
    return cosine, rank


# ------------------------------------------------------------------ trackers


class Tracker(Protocol):
    """A service that draws curves. To write one of your own, pass `on_log` to `xbm.train`."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Receives the figures of one step; those that are unknown are not among them."""

    def close(self, failed: bool) -> None:
        """Ends the run; `failed` if training was stopped by an error."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("train", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases that is named after the run folder; a resumed run continues it."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("wandb", "wandb")
        import wandb

        project, values = config.log.project, to_dict(config)
        self._run: Any = wandb.init(project=project, dir=str(folder), config=values, resume="allow", id=folder.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow in the experiment `log.project`, on the server or in the folder that MLFLOW_TRACKING_URI names."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("mlflow", "mlflow")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient()
        kept = folder / MLFLOW_RUN
        if step and kept.exists():
            self._run = kept.read_text().strip()
            client.update_run(self._run, status="RUNNING")
            return
        known = client.get_experiment_by_name(config.log.project)
        experiment = client.create_experiment(config.log.project) if known is None else known.experiment_id
        self._run = client.create_run(experiment, run_name=folder.name).info.run_id
        settings = [Param(name, str(value)[:MLFLOW_TEXT]) for name, value in flat(config).items()]
        client.log_batch(self._run, params=settings)
        write_bytes(kept, f"{self._run}\n".encode())

    def log(self, values: Mapping[str, float], step: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def open_trackers(config: Config, folder: Path, step: int) -> list[Tracker]:
    """The trackers of `log.trackers`, for a run that begins or resumes at `step`."""
    names = list(config.log.trackers)
    if config.log.wandb:
        warnings.warn("log.wandb=true is now log.trackers=tensorboard,wandb: change it", stacklevel=1)
        names.append("wandb")
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return [TRACKERS[name](config, folder, step) for name in dict.fromkeys(names)]


# ------------------------------------------------------------------ feature drift


class Drift(nn.Module):
    """Measures how fast the embeddings of some fixed images move while a model is trained (the paper's Eq. 2):

    D(x, t; Δt) = ‖f(x; θ_t) − f(x; θ_{t−Δt})‖².

    Call it with the model once per iteration; it embeds the images in eval mode only when a measurement is due, and at the
    earlier iterations that the measurement needs. Its whole state is in buffers, so it resumes with the run.

    Args:
        images: (n, ...) a few dozen fixed inputs.
        dim: D of the embeddings.
        every: how often to measure; a multiple of 10.
        steps: the Δt.

    Attributes:
        phases: iterations modulo `every` at which the images are embedded; a call at any other iteration does nothing.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> drift = Drift(torch.randn(5, 4), dim=3, every=10, steps=(10,))
        >>> for t in range(11):
        ...     means = drift(t, model)
        >>> {step: float(mean) for step, mean in means.items()}  # a model that was not trained does not drift
        {10: 0.0}
    """

    images: Tensor
    past: Tensor  # (slots, n, D): embeddings of earlier iterations
    taken: Tensor  # (slots,): the iteration of each, -1 = none

    def __init__(self, images: Tensor, dim: int, every: int = 100, steps: tuple[int, ...] = STEPS) -> None:
        super().__init__()
        self.every, self.steps = every, steps
        self.phases = sorted({-step % every for step in steps} | {0})
        slots = len(self.phases) * (max(steps) // every + 1)
        self.register_buffer("images", images, persistent=False)
        self.register_buffer("past", torch.zeros(slots, len(images), dim, device=images.device))
        self.register_buffer("taken", torch.full((slots,), -1, dtype=torch.int64))  # stays on the host: it is bookkeeping

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """(n, D): the embeddings of the images by the model in eval mode."""
        was_training = model.training
        model.eval()
        embeddings = model(self.images).float()
        model.train(was_training)
        return embeddings

    @torch.no_grad()
    def forward(self, t: int, model: nn.Module) -> dict[int, Tensor]:
        """Returns the mean drift for every Δt that can be measured at iteration t, as device tensors; {} if none is due."""
        if t % self.every not in self.phases or len(self.images) == 0:
            return {}
        now, means = self.embed(model), {}
        if t % self.every == 0:
            for step in self.steps:
                slot = (self.taken == t - step).nonzero()
                if t >= step and len(slot):
                    means[step] = (now - self.past[int(slot[0])]).square().sum(1).mean()
        oldest = int(self.taken.argmin())
        self.past[oldest], self.taken[oldest] = now, t
        return means

    def _apply(self, fn, recurse: bool = True) -> "Drift":  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        self.taken = self.taken.cpu()
        return self


# ------------------------------------------------------------------ warnings


def either(*choices: str) -> str:
    """
    >>> either("a"), either("a", "b"), either("a", "b", "c")
    ('a', 'a or b', 'a, b, or c')
    """
    return " or ".join(choices) if len(choices) < 3 else f"{', '.join(choices[:-1])}, or {choices[-1]}"


@dataclass
class RunWatcher:
    """Warns about collapse, a drop of R@1, and a memory that hurts or cannot help. Each warning is given once.

    Attributes:
        summed: whether the loss sums over negatives, so that many of them outweigh few positives.
        age: mean age of the memory's rows in steps, once it is full.
        remedies: settings that make a memory safer and that this run does not use.
        smaller, larger: advice for a memory that could be smaller or larger.
        negatives, positives: whether the training set has pairs of these kinds at all.
        notes: (severity, sentence), stored with the run.
    """

    memory_start: int
    summed: bool = False
    age: float = 0.0
    remedies: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()
    negatives: bool = True
    positives: bool = True
    notes: list[tuple[str, str]] = field(default_factory=list)
    recall_before_memory: float = math.nan
    given: set[str] = field(default_factory=set)  # kinds of warnings

    def check(self, row: dict[str, float]) -> list[str]:
        """Returns the new warnings that a row of metrics gives rise to."""
        warnings = {**self._collapse(row), **self._drop(row), **self._memory(row), **self._drift(row)}
        new = {kind: text for kind, text in warnings.items() if kind not in self.given}
        self.given |= new.keys()
        self.notes += [("warning", text) for text in new.values()]
        return list(new.values())

    def _collapse(self, row: dict[str, float]) -> dict[str, str]:
        cosine, rank = row.get("mean_cosine", math.nan), row.get("effective_rank", math.nan)
        if not (cosine > COLLAPSED_COSINE or rank < COLLAPSED_RANK):
            return {}
        advice = either(*self.remedies, "a lower optim.lr", *self.smaller)
        return {
            "collapse": f"iteration {row['step']:.0f}: the embeddings are collapsing (mean cosine {cosine:.3f}, effective rank "
            f"{rank:.1f}): try {advice}"
        }

    def _drop(self, row: dict[str, float]) -> dict[str, str]:
        recall, before = row.get("recall@1", math.nan), self.recall_before_memory
        if row["step"] < self.memory_start:
            self.recall_before_memory = before if math.isnan(recall) else recall
        elif recall < before - 0.02:
            return {
                "fall": f"iteration {row['step']:.0f}: R@1 fell from {100 * before:.1f} to {100 * recall:.1f} since the memory "
                f"started: try {either(*self.remedies, 'a later memory.start')}"
            }
        return {}

    def _memory(self, row: dict[str, float]) -> dict[str, str]:
        negatives, positives = (row.get(f"valid_{side}_memory", math.nan) for side in ("negatives", "positives"))
        if math.isnan(negatives) or math.isnan(positives):
            return {}
        iteration = f"iteration {row['step']:.0f}"
        if not self.negatives:
            return {"one": "there is only one training class and therefore no negative: provide at least two classes"}
        if not self.positives:
            return {"alone": "no training class has two images, so there are no positives and the memory cannot help"}
        if negatives == 0:
            return {
                "idle": f"{iteration}: no negative in the memory is similar enough to any anchor to count: the memory only "
                "pulls positives together. More or harder classes would help; compare with --no-memory"
            }
        if positives == 0:
            return {
                "alone": f"{iteration}: the memory held no positive for any anchor, so it only pushes embeddings apart: "
                f"try {either(*self.larger, 'leaving out classes with a single image')}"
            }
        if self.summed and negatives > OUTWEIGHED * positives:
            return {
                "outweighed": f"{iteration}: the memory's negatives outweigh its positives {negatives / positives:.0f} to 1, "
                "which can tear classes apart: try memory.reduction=balanced"
            }
        return {}

    def _drift(self, row: dict[str, float]) -> dict[str, str]:
        in_use = not math.isnan(row.get("valid_negatives_memory", math.nan) + row.get("valid_positives_memory", math.nan))
        for delta in (10, 100, 1000):
            drift = row.get(f"drift_{delta}", math.nan)
            if in_use and delta <= self.age and drift > LARGE_DRIFT:
                advice = either("a lower optim.lr", "a later memory.start", *self.smaller)
                return {
                    "lost": f"iteration {row['step']:.0f}: within {delta} steps an embedding moves by {drift:.2f} (squared "
                    f"distance), and the memory's rows are {self.age:.0f} steps old on average: they are out of date and "
                    f"cannot help until the drift slows down; try {advice}"
                }
        return {}

    def state_dict(self) -> dict[str, object]:
        notes = [list(note) for note in self.notes]
        return {"notes": notes, "before": self.recall_before_memory, "said": sorted(self.given)}

    def load_state_dict(self, state: dict) -> None:
        self.notes = [(severity, text) for severity, text in state["notes"]]
        self.recall_before_memory, self.given = state["before"], set(state["said"])


def watcher_of(config: Config, memory_size: int, labels: Sequence[int] | np.ndarray) -> RunWatcher:
    """The watcher for a run with these training labels; `memory_size` is 0 without a memory."""
    if not memory_size:
        return RunWatcher(config.optim.iterations)
    unbounded = config.loss.name in ("contrastive", "margin")  # their negatives weigh more the more there are
    remedies = []
    if unbounded and config.reduction != "balanced":
        remedies.append("memory.reduction=balanced")
    if not config.memory.batch_weight:
        remedies.append("memory.batch_weight=1")
    class_sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    rows_per_step = config.batch.size * config.batch.accumulate * config.memory.updates_per_step
    return RunWatcher(
        config.memory.start,
        summed=unbounded and config.reduction == "sum",
        age=memory_size / rows_per_step / 2,
        remedies=tuple(remedies),
        smaller=("a smaller memory.ratio",) if config.memory.update == "queue" else (),  # keyed memories have one size
        larger=("a larger memory.ratio",) if config.memory.ratio < 1 else (),
        negatives=len(class_sizes) > 1,
        positives=bool((class_sizes > 1).any()),
    )
