"""The metrics of a run: a CSV that resumes exactly, and trackers; and warnings about what they show."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xbm_app.files import reading, record_checksum, replacing, verify
from xbm_app.train.config import Config, save
from xbm_app.train.trackers import open_trackers

COLUMNS = (
    "step", "loss", "batch_loss", "memory_loss", "lr", "valid_negatives_batch", "valid_negatives_memory",
    "valid_positives_memory", "mean_cosine", "effective_rank", "drift_10", "drift_100", "drift_1000", "recall@1",
    "map@r",
)  # fmt: skip
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
                "idle": f"{iteration}: no negative in the memory is similar enough to any anchor to count, so the memory has "
                "no effect: it needs more classes, or harder ones"
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
