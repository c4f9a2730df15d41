"""What a run writes down as it goes: a CSV that resumes exactly, TensorBoard, and Weights & Biases when asked."""

import csv
import math
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from xbm.errors import InputError
from xbm_app.train.config import Config, save, to_dict
from xbm_app.train.files import replacing

COLUMNS = (
    "step", "loss", "batch_loss", "memory_loss", "lr", "valid_negatives_batch", "valid_negatives_memory",
    "valid_positives_memory", "mean_cosine", "effective_rank", "drift_10", "drift_100", "drift_1000", "recall@1",
    "map@r",
)  # fmt: skip


class Metrics:
    """Rows of `metrics.csv`, mirrored to TensorBoard. Opening at `step` cuts off what a killed run wrote from there on."""

    def __init__(self, folder: Path, step: int, config: Config, writes: bool = True) -> None:
        self.writes = writes  # one log, whatever the number of processes
        if not writes:
            return
        save(config, folder / "config.yaml")
        self.path = folder / "metrics.csv"
        rows = [row for row in read_metrics(self.path) if row["step"] < step] if self.path.exists() else []
        with replacing(self.path) as beside, open(beside, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([_text(row[name]) for name in COLUMNS] for row in rows)
        self._file = self.path.open("a", newline="")
        self._csv = csv.writer(self._file)
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        self._wandb: Any = None
        if config.log.wandb:
            try:
                import wandb
            except ModuleNotFoundError:
                raise InputError("log.wandb needs the wandb package: pip install wandb, or leave log.wandb off") from None
            self._wandb = wandb.init(project="xbm", dir=str(folder), config=to_dict(config), resume="allow", id=folder.name)

    def write(self, values: dict[str, float], speed: float = math.nan) -> None:
        if not self.writes:
            return
        self._csv.writerow([_text(values.get(name, math.nan)) for name in COLUMNS])
        self._file.flush()
        step = int(values["step"])
        known = {name: value for name, value in values.items() if name != "step" and not math.isnan(value)}
        for name, value in known.items():
            self._board.add_scalar(name, value, step)
        if not math.isnan(speed):
            self._board.add_scalar("iterations_per_second", speed, step)
        if self._wandb is not None:
            self._wandb.log(known, step=step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.writes:
            return
        # closing writes what is buffered; on a full disk that fails once more, and the first error is the one to tell
        with suppress(OSError) if kind is not None else nullcontext():
            self._file.close()
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file; a line that a kill cut short is left out. A column that an older file lacks is NaN."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    rows = []
    for line in lines[1:]:
        if len(line) == len(lines[0]):
            try:
                found = {name: float(x) if x else math.nan for name, x in zip(lines[0], line)}
                rows.append({name: found.get(name, math.nan) for name in COLUMNS})
            except ValueError:
                continue
    return rows


def _text(value: float) -> str:
    if isinstance(value, float) and math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
