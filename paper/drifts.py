"""Experiments about slow drift: how far embeddings move (Figure 3, S-Figure 1), and what that does to gradients (Lemma 1)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paper import published
from paper.arms import SCRATCH, contrastive, queue
from paper.blocks import Block, Claim, Figure, Table
from paper.classification import LOSS as CROSS_ENTROPY
from paper.experiment import OFF, SMALL, Arm, Experiment, Setting
from paper.record import Record
from paper.study import Study
from xbm_app.report.drift_curves import drift_panel, drift_table


def _scratch(setting: Setting) -> dict[str, Any]:
    rate = 1e-3 if setting.data in SMALL else 3e-4
    return {**SCRATCH, "loss.name": "contrastive", "optim.lr": rate}


def drift_arms(setting: Setting) -> list[Arm]:
    """From scratch over 6,000 iterations, as the paper's figure; from pretrained weights; and without any pairs."""
    arms = [
        Arm("from scratch, contrastive", {**_scratch(setting), **OFF}, choose=None, seeds=1),
        Arm(
            "from scratch, classification",
            {**_scratch(setting), **OFF, "loss.name": CROSS_ENTROPY, "batch.sampler": "shuffle"},
            choose=None,
            seeds=1,
        ),
    ]
    if setting.data not in SMALL:
        without, _ = contrastive(setting)
        arms += [
            replace(without, label="pretrained, contrastive", seeds=1),
            replace(queue(setting), label="pretrained, contrastive, queue", seeds=1),
        ]
    return arms


def draw_drift(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        found = [(arm.label, runs[0]) for arm in study.arms if (runs := study.finished(arm))]
        panels = [panel for label, record in found if (panel := drift_panel(label, record.curves))["lines"]]
        if not panels:
            continue
        caption = (
            f"Mean squared distance between the embedding of a fixed image now and Δt iterations ago, in eval mode, "
            f"{study.setting.label}. Dotted: the learning rate falls to a tenth. Classification shows the normalised features "
            "of the pooling layer."
        )
        blocks.append(Figure(f"drift_{study.setting.slug}", {"panels": panels}, caption))
        header = ["D, mean of a stretch", "Δt", "first tenth", "before the decay", "after the decay"]
        rows = [row for label, record in found for row in drift_table(label, record.curves)]
        blocks += [
            Table(header, rows),
            *(_stable(f"{study.setting.where}, {label}", record) for label, record in found),
        ]
    return [block for block in blocks if block]


def _stable(label: str, record: Record) -> Claim:
    """When large steps became small: the paper says within about 3,000 iterations from scratch."""
    x, y = record.curve("drift_100")
    if len(y) < 4 or "from scratch" not in label:
        return Claim()
    half = max(y) / 2
    over = [step for step, value in zip(x, y) if value > half]
    return Claim(
        f"{label}: D(Δt = 100) peaks at {max(y):.3g}, is above half of that last at iteration {over[-1]:.0f}, and ends at "
        f"{y[-1]:.3g} (the paper: stable within about {published.STABLE_AFTER:,} iterations)."
    )


# ------------------------------------------------------------------ Lemma 1


def lemma_arms(setting: Setting) -> list[Arm]:
    usual = queue(setting)
    fast = Arm(
        "from scratch, contrastive, queue",
        {**_scratch(setting), **usual.settings, "optim.iterations": 2000, "optim.decay_at": (), "memory.start": 0},
        choose=None,
        measures=("lemma",),
        seeds=1,
    )
    return [replace(usual, seeds=1), fast]


def draw_lemma(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        rows, panels, below = [], [], []
        for arm in study.arms:
            told = next((run.measures["lemma"] for run in study.runs(arm) if "lemma" in run.measures), None)
            if told is None:
                continue
            C = np.array(told["C"])
            kept: list[np.ndarray] = []
            lines: list[dict[str, Any]] = []
            for colour, (source, pairs) in enumerate(told["pairs"].items()):
                error, bound = np.array(pairs["error"]), C[pairs["anchor"]] * np.array(pairs["epsilon"])
                if not len(error):
                    continue
                name = "rows of the memory" if source == "memory" else f"Δt = {source}"
                holds = error <= bound * 1.001  # power iteration ends a little below C
                kept.append(holds)
                share = error[bound > 0] / bound[bound > 0]
                rows.append([
                    f"{arm.label}, {name}", str(len(error)), _number(np.mean(pairs["epsilon"])), _number(error.mean()),
                    _number(bound.mean()), f"{np.median(share):.2g}", f"{100 * holds.mean():.1f} %",
                ])  # fmt: skip
                positive = (error > 0) & (bound > 0)
                x, y = ([float(f"{v:.3g}") for v in each[positive]] for each in (bound, error))
                lines.append({"label": name, "x": x, "y": y, "points": True, "colour": colour})
            share_kept = 100 * np.concatenate(kept).mean() if kept else math.nan
            below.append(
                Claim(
                    f"{study.setting.where}, {arm.label}: the error of a gradient stays within C · ε for {share_kept:.1f} % of "
                    f"the pairs. C = σ_max² is {_number(np.median(C))} in the median of {len(C)} anchors ({_number(C.min())} "
                    f"to {_number(C.max())}); it is below 1, as the paper observed, for {(C < 1).sum()} of them."
                )
            )
            values = [v for line in lines for axis in ("x", "y") for v in line[axis]]
            if values:
                ends = [min(values), max(values)]
                axes = {"x": "C · ε", "y": "‖gradient error‖²", "y_log": True, "x_log": 10, "diagonal": ends}
                panels.append({"title": arm.label, "lines": lines, **axes})
        if rows:
            caption = f"Lemma 1 pair by pair, {study.setting.label}: squared error of the gradient against its bound."
            drawn = Figure(f"lemma-1_{study.setting.slug}", {"panels": panels}, caption)
            header = ["", "pairs", "mean ε", "mean error²", "mean C · ε", "error² / bound, median", "bound holds"]
            blocks += [drawn, Table(header, rows), *below]
    return blocks


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


EXPERIMENTS = (
    Experiment(
        "drift", "Slow drift: from scratch, from pretrained weights, and under classification",
        "Figure 3; supplementary, Figure 1", ("sop",), drift_arms, draw_drift,
    ),
    Experiment(
        "lemma-1", "The error of a gradient against C · ε, pair by pair", "Lemma 1; supplementary, section 5", ("sop",),
        lemma_arms, draw_lemma,
    ),
)  # fmt: skip
