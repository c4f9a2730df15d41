"""The one way figures are drawn: panels of lines or points from plain values, the same bytes for the same values."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#d1495b", "#3c8d53", "#8e5ea2", "#c77d22", "#5f6b73", "#111111")
STYLE: dict[str, Any] = {
    "svg.hashsalt": "xbm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.5,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "figure.facecolor": "white",
}  # fmt: skip


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def save(data: Any, path: Path) -> None:
    """Draws panels to an SVG file that names the digest of its values.

    Args:
        data: {"panels": [panel, ...]}. A panel has title, x and y (axis titles), lines, and where wanted x_log, y_log, ticks,
            diagonal. A line has label, x, y, and where wanted error, dashed, marker, points (no line), paper (drawn apart).
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
        """0.3 and 2, not 3 × 10⁻¹ nor 3e-01; which ticks are named is the same."""

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
            axes.set_xscale("symlog", linthresh=panel["x_log"]) if panel["x_log"] < 1 else axes.set_xscale(
                "log", base=panel["x_log"]
            )
        if panel.get("y_log"):
            axes.set_yscale("log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which(Plain(labelOnlyBase=False))
        if panel.get("ticks"):
            axes.set_xticks(panel["ticks"], [f"{tick:g}" for tick in panel["ticks"]])
            axes.minorticks_off()
        for at in panel.get("marks", ()):
            axes.axvline(at, color="#999999", linewidth=0.9, linestyle=":")
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
        low = [y - e for y, e in zip(line["y"], line["error"])]
        high = [y + e for y, e in zip(line["y"], line["error"])]
        axes.fill_between(line["x"], low, high, color=colour, alpha=0.15, linewidth=0)
