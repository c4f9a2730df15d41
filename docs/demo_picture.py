"""Draws docs/demo.png, the README's picture: real photographs from paper/results/, glyphs from a demo run.

`xbm demo --json docs/demo.json`, then `PYTHONPATH=. python docs/demo_picture.py`.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from paper.experiment import Setting, loss_arms
from paper.experiments import experiment
from paper.record import Records
from paper.study import Study, paired
from xbm_app.cli.demo import summary

HERE = Path(__file__).parent
INK, GREY, BLUE = "#24292f", "#8c959f", "#2f6fde"
Figure = tuple[float, float]  # mean and standard error
Row = tuple[str, Figure, Figure, Figure]  # label; without, with memory, gain


def photographs() -> list[Row]:
    setting = Setting("cars", "efficientnet_lite0", "imagenet")
    study = Study(experiment("s-table-3"), setting, Records(HERE.parent / "paper" / "results"))
    arms = {arm.label: arm for arm in loss_arms(setting)}
    rows: list[Row] = []
    for loss in ("contrastive", "MS"):
        without, with_memory = study.spread(arms[loss]), study.spread(arms[f"{loss} w/ M"])
        assert without is not None and with_memory is not None
        found = [(100 * each.mean, 100 * each.error) for each in (without, with_memory, paired(without, with_memory))]
        rows.append((f"Cars-196, {loss}", *found))
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
        axes.text(without[0] - without[1] - 0.5, y, f"{without[0]:.1f}", va="center", ha="right", color=INK)
        told = f"{with_memory[0]:.1f}   +{gain[0]:.1f} ± {gain[1]:.1f}"
        axes.text(with_memory[0] + with_memory[1] + 0.5, y, told, va="center", color=INK)
    axes.set_yticks([-k for k in range(len(rows))], [label for label, *_ in rows])
    axes.set_ylim(-len(rows) + 0.45, 0.55)
    axes.set_xlim(min(row[1][0] for row in rows) - 4, max(row[2][0] for row in rows) + 7)
    axes.set_xlabel("R@1 on classes never seen (%), without (grey) and with memory (blue), 3 seeds", fontsize=9)
    axes.grid(axis="x", color="#eaeef2")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(HERE / "demo.png")


if __name__ == "__main__":
    main()
