"""Figures as SVG files, drawn by matplotlib: those of the paper, and the feature drift of runs (`xbm drift`).

A figure is panels of lines or points from plain values; the same values give the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xbm_app.report.run_folders import Curves
from xbm_app.report.writing import MISSING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#d1495b", "#3c8d53", "#8e5ea2", "#c77d22", "#5f6b73", "#111111")
STYLE: dict[str, Any] = {
    "svg.hashsalt": "xbm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.5,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "figure.facecolor": "white",
}  # fmt: skip
DELTAS = (10, 100, 1000)  # steps between the two states that drift compares


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def save(data: Any, path: Path) -> None:
    """Draws panels to an SVG file that contains the digest of its values.

    Args:
        data: {"panels": [panel, ...]}. A panel has title, x and y (axis titles) and lines; x_log, y_log, ticks, diagonal and
            marks are optional. A line has label, x and y; error, dashed, marker, colour and points (no line) are optional.
    """
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):  # type: ignore[dict-item]
        figure = draw(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": f"values {digest(data)}"})


def draw(data: Any) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Writes 0.3 and 2 instead of 3 × 10⁻¹ and 3e-01, at the same ticks."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    panels = data["panels"]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 3.5 * columns, 3.0 * rows), layout=ConstrainedLayoutEngine(h_pad=0.12))
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        for n, line in enumerate(panel["lines"]):
            _line(axes, line, COLOURS[line.get("colour", n) % len(COLOURS)])
        if panel.get("diagonal"):
            low, high = panel["diagonal"]
            axes.plot([low, high], [low, high], color="#777777", linewidth=1, linestyle="--", label="the bound")
        axes.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
        if panel.get("x_log"):
            x_log = panel["x_log"]  # below 1 where a linear part around 0 ends, otherwise the base
            axes.set_xscale("symlog", linthresh=x_log) if x_log < 1 else axes.set_xscale("log", base=x_log)
        if panel.get("y_log"):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(Plain(labelOnlyBase=False))
            axes.yaxis.set_minor_formatter(Plain(labelOnlyBase=False))
        if panel.get("ticks"):
            axes.set_xticks(panel["ticks"], [f"{tick:g}" for tick in panel["ticks"]])
            axes.minorticks_off()
        for x in panel.get("marks", ()):
            axes.axvline(x, color="#999999", linewidth=0.9, linestyle=":")
        if any(line["label"] for line in panel["lines"]):
            axes.legend(fontsize=7.5, handlelength=3)
    return figure


def _line(axes: Any, line: dict[str, Any], colour: str) -> None:
    if line.get("points"):
        axes.plot(line["x"], line["y"], ".", markersize=3, alpha=0.5, color=colour, label=line["label"])
        return
    style = "--" if line.get("dashed") else "-"
    marker = "o" if line.get("marker", len(line["x"]) < 12) else ""
    axes.plot(line["x"], line["y"], style, marker=marker, markersize=3.5, color=colour, label=line["label"])
    if line.get("error"):
        low, high = np.subtract(line["y"], line["error"]), np.add(line["y"], line["error"])
        axes.fill_between(line["x"], low, high, color=colour, alpha=0.15, linewidth=0)


# ------------------------------------------------------------------ feature drift


def drift_table(label: str, curves: Curves) -> list[list[str]]:
    """One row per Δt: label, Δt, and the mean drift in the first tenth, before the first decay and after it."""
    rows = []
    decays = [step for step in curves.decays if step < curves.iterations]
    for delta in DELTAS:
        x, y = (np.array(values) for values in curves.curve(f"drift_{delta}"))
        if not len(x):
            continue
        first = y[x <= x[0] + 0.1 * (x[-1] - x[0])]
        edge = decays[0] if decays else math.inf
        before = y[(x < edge) & (x >= edge - 0.1 * curves.iterations)] if decays else y[-max(1, len(y) // 10) :]
        after = y[x >= edge + delta]  # so that θ_{t−Δt} is after the decay too
        rows.append([label, str(delta), *(f"{part.mean():.3g}" if len(part) else MISSING for part in (first, before, after))])
    return rows


def drift_panel(title: str, curves: Curves) -> dict[str, Any]:
    """D against the iteration, one line per Δt; learning-rate decays are marked."""
    lines = []
    for colour, delta in enumerate(DELTAS):
        x, y = curves.curve(f"drift_{delta}")
        if x:
            lines.append({"label": f"Δt = {delta}", "x": x, "y": y, "colour": colour, "marker": False})
    decays = [step for step in curves.decays if step < curves.iterations]
    return {"title": title, "x": "iteration", "y": "drift D", "lines": lines, "marks": decays}


def draw_drift(runs: Mapping[str, Curves], out: Path) -> Path:
    """Writes one panel per run to an SVG file."""
    save({"panels": [drift_panel(name, curves) for name, curves in runs.items()]}, out)
    return out


def drift_values(curves: Curves) -> dict[str, Any]:
    """The drift curves as plain values: {"10": {"step": [...], "drift": [...]}, ...}."""
    deltas = [name.removeprefix("drift_") for name in curves.columns if name.startswith("drift_")]
    return {delta: dict(zip(("step", "drift"), curves.curve(f"drift_{delta}"))) for delta in deltas}
