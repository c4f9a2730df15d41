"""The drift of any finished or running run: D(x, t; Δt) of fixed training images in eval mode, as a table and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xbm.errors import InputError
from xbm.study.paper import chart
from xbm.study.paper.drifts import drift_panel, phases
from xbm.study.paper.record import Record, identity
from xbm.study.paper.work import curves
from xbm.train.config import load


def drift_of(folder: Path) -> Record:
    """What a run folder holds about drift.

    Raises:
        InputError: there is no run, or it has not come far enough.
    """
    config = load(folder / "config.yaml")
    if not (folder / "metrics.csv").exists():
        raise InputError(f"{folder} has no metrics.csv: give a run folder made by `xbm train`")
    found = curves(folder)
    if not any(name.startswith("drift_") for name in found):
        raise InputError(f"{folder} has not measured drift yet: it takes {max(10, config.log.every)} iterations and ten more")
    return Record({"config": identity(config), "curves": found, "iterations": config.optim.iterations})


def drift_table(records: dict[str, Record]) -> list[list[str]]:
    """Rows of (run, Δt, first tenth, before the decay, after it)."""
    return [row for name, record in records.items() for row in phases(name, record)]


def draw_drift(records: dict[str, Record], out: Path) -> Path:
    chart.save({"panels": [drift_panel(name, record) for name, record in records.items()]}, out)
    return out


def drift_curves(record: Record) -> dict[str, Any]:
    """The curves as plain values: {"10": {"step": [...], "drift": [...]}, ...}."""
    deltas: Sequence[str] = [name.removeprefix("drift_") for name in record.values["curves"] if name.startswith("drift_")]
    return {delta: dict(zip(("step", "drift"), record.curve(f"drift_{delta}"))) for delta in deltas}
