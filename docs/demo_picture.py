"""Draws docs/demo.png: real photographs from paper/results/, glyphs from a demo run.

`xbm demo --json docs/demo.json`, then `PYTHONPATH=. python docs/demo_picture.py`.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from paper.experiment import Setting
from paper.experiments import experiment
from paper.experiments.s_table_3 import TRUNK, compare
from paper.experiments.tuning import TUNED
from paper.record import Records
from paper.study import Study
from xbm_app.cli.demo import summary

HERE = Path(__file__).parent
INK, GREY, BLUE = "#24292f", "#8c959f", "#2f6fde"
Figure = tuple[float, float]  # mean and standard error
Row = tuple[str, Figure, Figure, Figure]  # label; without, with memory, gain


def photographs() -> list[Row]:
    """Cars with GoogLeNet, both sides tuned: S-Table 3."""
    setting = Setting("cars", TRUNK, "googlenet_bvlc_fp16.safetensors")
    study = Study(experiment("s-table-3-tuned"), setting, Records(HERE.parent / "paper" / "results"))
    rows: list[Row] = []
    for loss in ("contrastive", "MS"):
        found = compare(study, loss, TUNED)
        assert found.gain is not None
        spreads = [(100 * each.mean, 100 * each.error) for each in (found.one, found.other)]
        rows.append((f"Cars-196, {loss}", *spreads, (100 * found.gain.mean, 100 * found.gain.error)))
    return rows


def glyphs() -> list[Row]:
    found = {row["name"]: row for row in summary(json.loads((HERE / "demo.json").read_text())["runs"])}
    rows: list[Row] = []
    for loss in ("contrastive", "MS"):
        without, with_memory = found[loss], found[f"{loss} + memory"]
        both = [(100 * each["mean"], 100 * each["error"]) for each in (without, with_memory)]
        rows.append((f"glyphs, {loss}", *both, (100 * with_memory["gain"], 100 * with_memory["gain_error"])))
    return rows


def main() -> None:
    figure, axes = plt.subplots(figsize=(7.2, 2.7), dpi=160)
    rows = [*photographs(), *glyphs()]
    for k, (_, without, with_memory, gain) in enumerate(rows):
        y = -k
        axes.plot([without[0], with_memory[0]], [y, y], color=BLUE, alpha=0.35, linewidth=5, solid_capstyle="butt", zorder=1)
        for (mean, error), colour in ((without, GREY), (with_memory, BLUE)):
            axes.errorbar(mean, y, xerr=error, fmt="o", color=colour, ecolor=colour, capsize=3, markersize=7, zorder=2)
        left, right = sorted((without, with_memory))  # a memory may lose
        change = f"{gain[0]:+.1f} ± {gain[1]:.1f}".replace("-", "−")
        axes.text(left[0] - left[1] - 0.5, y, f"{left[0]:.1f}", va="center", ha="right", color=INK)
        axes.text(right[0] + right[1] + 0.5, y, f"{right[0]:.1f}   {change}", va="center", color=INK)
    axes.set_yticks([-k for k in range(len(rows))], [label for label, *_ in rows])
    axes.set_ylim(-len(rows) + 0.45, 0.55)
    axes.set_xlim(min(min(row[1:3])[0] for row in rows) - 4, max(max(row[1:3])[0] for row in rows) + 7)
    axes.set_xlabel("R@1 on unseen classes (%), without (gray) and with memory (blue)", fontsize=9)
    axes.grid(axis="x", color="#eaeef2")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(HERE / "demo.png")


if __name__ == "__main__":
    main()
