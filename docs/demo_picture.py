"""Draws docs/demo.png, the README's picture, from the figures of a demo run: `xbm demo --json docs/demo.json`, then this."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from xbm.study.demo import summary

HERE = Path(__file__).parent
INK, GREY, BLUE = "#24292f", "#b5bcc4", "#2f6fde"


def main() -> None:
    runs = json.loads((HERE / "demo.json").read_text())["runs"]
    rows = {row["name"]: row for row in summary(runs)}
    figure, axes = plt.subplots(figsize=(7.2, 2.6), dpi=160)
    places = []
    for k, loss in enumerate(("contrastive", "MS")):
        for j, (name, colour) in enumerate(((loss, GREY), (f"{loss} + memory", BLUE))):
            row, y = rows[name], -(2.6 * k + j)
            axes.barh(y, 100 * row["mean"], xerr=100 * row["error"], color=colour, height=0.86, ecolor=INK, capsize=3)
            gain = f"   +{100 * row['gain']:.1f} ± {100 * row['gain_error']:.1f}" if "gain" in row else ""
            axes.text(100 * (row["mean"] + row["error"]) + 0.4, y, f"{100 * row['mean']:.1f}{gain}", va="center", color=INK)
            places.append((y, name))
    axes.set_yticks([y for y, _ in places], [name for _, name in places])
    low = min(100 * rows[name]["mean"] for _, name in places)
    axes.set_xlim(max(0, 10 * ((low - 12) // 10)), None)
    seeds, iterations = rows["contrastive"]["seeds"], runs[0]["iterations"]
    axes.set_xlabel(f"R@1 on glyphs of classes never seen (%), {seeds} seeds, {iterations} iterations on a CPU")
    axes.margins(x=0.18)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(HERE / "demo.png")


if __name__ == "__main__":
    main()
