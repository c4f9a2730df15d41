"""The feature drift of a run, D(x, t; Δt) of fixed training images in eval mode, as a table, curves and a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import InputError
from xbm_app.report import panels
from xbm_app.train.config import load
from xbm_app.train.metrics import COLUMNS, read_metrics

STEPS = (10, 100, 1000)
MISSING = "–"


class Curves(NamedTuple):
    """What a run logged while it trained."""

    columns: Mapping[str, Sequence[float | None]]  # "step" and one column per quantity; None where nothing was measured
    decays: tuple[int, ...]  # iterations at which the learning rate fell
    iterations: int  # of the whole run

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of one column, without its gaps."""
        points = [(s, v) for s, v in zip(self.columns.get("step", ()), self.columns.get(name, ())) if v is not None]
        return [s for s, _ in points], [v for _, v in points]  # type: ignore[misc]


def read_columns(folder: Path) -> dict[str, list[float | None]]:
    """The metrics of a run folder without empty columns, to four digits; None where nothing was measured."""
    rows = read_metrics(folder / "metrics.csv")
    table = {name: [_four_digits(row[name]) for row in rows] for name in COLUMNS}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def _four_digits(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def read_drift(folder: Path) -> Curves:
    """The curves of a run folder.

    Raises:
        InputError: there is no run, or it has not measured drift yet.
    """
    config = load(folder / "config.yaml")
    if not (folder / "metrics.csv").exists():
        raise InputError(f"{folder} has no metrics.csv: give a run folder made by `xbm train`")
    columns = read_columns(folder)
    if not any(name.startswith("drift_") for name in columns):
        raise InputError(f"{folder} has not measured drift yet: it takes {max(10, config.log.every)} iterations and ten more")
    return Curves(columns, config.optim.decay_at, config.optim.iterations)


def drift_table(label: str, curves: Curves) -> list[list[str]]:
    """One row per Δt: (label, Δt, mean drift in the first tenth, before the first decay, after it)."""
    rows = []
    decays = [step for step in curves.decays if step < curves.iterations]
    for delta in STEPS:
        x, y = (np.array(values) for values in curves.curve(f"drift_{delta}"))
        if not len(x):
            continue
        first = y[x <= x[0] + 0.1 * (x[-1] - x[0])]
        edge = decays[0] if decays else math.inf
        before = y[(x < edge) & (x >= edge - 0.1 * curves.iterations)] if decays else y[-max(1, len(y) // 10) :]
        after = y[x >= edge + delta]  # θ_{t−Δt} is behind the decay too
        rows.append([label, str(delta), *(f"{part.mean():.3g}" if len(part) else MISSING for part in (first, before, after))])
    return rows


def drift_panel(title: str, curves: Curves) -> dict[str, Any]:
    """D against the iteration, one line per Δt; learning-rate decays are marked."""
    lines = []
    for colour, delta in enumerate(STEPS):
        x, y = curves.curve(f"drift_{delta}")
        if x:
            lines.append({"label": f"Δt = {delta}", "x": x, "y": y, "colour": colour, "marker": False})
    decays = [step for step in curves.decays if step < curves.iterations]
    return {"title": title, "x": "iteration", "y": "drift D", "lines": lines, "marks": decays}


def draw_drift(runs: Mapping[str, Curves], out: Path) -> Path:
    panels.save({"panels": [drift_panel(name, curves) for name, curves in runs.items()]}, out)
    return out


def drift_values(curves: Curves) -> dict[str, Any]:
    """The drift curves as plain values: {"10": {"step": [...], "drift": [...]}, ...}."""
    deltas = [name.removeprefix("drift_") for name in curves.columns if name.startswith("drift_")]
    return {delta: dict(zip(("step", "drift"), curves.curve(f"drift_{delta}"))) for delta in deltas}
