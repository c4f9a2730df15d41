"""Beyond the paper: why its memory hurts some nets. The weight of the memory's negatives beside its positives, the age of its
rows, and what becomes of R@1 when either is changed alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paper.arms import SUMMED
from paper.balance import PUSHED
from paper.blocks import Block, Claim, Figure, Table, percent, spread
from paper.experiment import OFF, SMALL, Arm, Experiment, Setting
from paper.recipes import BALANCED, BEYOND, FULL_QUEUE, SETTINGS, held_out
from paper.record import Record
from paper.study import Study

PUSHES = (0.5, 0.8, 1.5, 3.0, 10.0)  # ρ; 1 is the balanced loss, no bound the sum
YOUNGER = 8
BARE, SUM, LEVEL, YOUNG = "no memory", "summed", "balanced", f"summed, rows {YOUNGER} times younger"


SHARES = (
    "What an anchor's gradient is made of at the end of training, seed 0: mean norms of the pull of positives and of the push "
    "of valid negatives, and the median age of the memory's rows and of those that push, in batches enqueued since:"
)


def cause_arms(setting: Setting) -> list[Arm]:
    """The batch is summed in all of them: they differ in the memory alone."""
    kinds: dict[str, dict[str, Any]] = {BARE: OFF, SUM: FULL_QUEUE, LEVEL: {**FULL_QUEUE, **BALANCED}}
    if setting.data in SMALL:
        kinds[YOUNG] = {**kinds[SUM], "memory.updates_per_step": YOUNGER}
        for push in PUSHES:
            kinds[_pushed(push)] = {**kinds[LEVEL], "loss.name": PUSHED, "loss.options": {"push": push}}
    return held_out(setting, {label: {**SUMMED, **kind} for label, kind in kinds.items()}, ("shares",))


def _pushed(push: float) -> str:
    return f"push at most {push:g} × pull"


def draw_cause(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        arms = {arm.label: arm for arm in study.arms}
        first = {label: runs[0] for label, arm in arms.items() if (runs := study.finished(arm))}
        if not {BARE, SUM, LEVEL} <= first.keys():
            continue
        panels = [
            _panel(
                "Negatives over positives, memory", "valid pairs, ratio", {k: ratio(first[k]) for k in (SUM, LEVEL)}, y_log=True
            ),
            _panel("Drift over 100 steps", "squared distance", {k: first[k].curve("drift_100") for k in (BARE, SUM, LEVEL)}),
            _panel("Effective rank of a batch", "", {k: first[k].curve("effective_rank") for k in (BARE, SUM, LEVEL)}),
        ]
        known = [push for push in PUSHES if _pushed(push) in first]
        if known:
            panels.append(_swept(study, arms, sorted([1.0, *known])))
        caption = f"{study.setting.label}, contrastive, seed 0: with the memory's pairs summed, and balanced."
        blocks.append(Figure(f"cause_{study.setting.slug}", {"panels": panels}, caption))
        rows = [[label, spread(study.spread(arm)), *_late(first[label])] for label, arm in arms.items() if label in first]
        header = ["held-out training classes", "R@1, %", "negatives over positives", "drift over 100 steps", "effective rank"]
        parts = [[label, *_parts(record)] for label, record in first.items() if record.measures.get("shares")]
        names = ["", "pull, batch", "push, batch", "pull, memory", "push, memory", "age of rows", "age of those that push"]
        blocks += [Table(header, rows), _verdict(study, arms, first)]
        if parts:
            blocks += [SHARES, Table(names, parts)]
    if blocks:
        blocks.append(
            "Columns but the first two are medians of the last quarter of training, seed 0, of the memory's valid pairs."
        )
    return blocks


def ratio(record: Record) -> tuple[list[float], list[float]]:
    """(steps, valid negatives over valid positives of the memory)."""
    steps, negatives = record.curve("valid_negatives_memory")
    there = dict(zip(*record.curve("valid_positives_memory")))
    known = [(step, many / there[step]) for step, many in zip(steps, negatives) if there.get(step) and many]
    return [step for step, _ in known], [value for _, value in known]


def _settled(curve: tuple[list[float], list[float]]) -> float:
    values = curve[1][len(curve[1]) * 3 // 4 :]
    return float(np.median(values)) if values else float("nan")


def _late(record: Record) -> list[str]:
    found = (_settled(ratio(record)), _settled(record.curve("drift_100")), _settled(record.curve("effective_rank")))
    return ["–" if value != value else f"{value:.3g}" for value in found]


def _parts(record: Record) -> list[str]:
    """Norms of the parts of the gradient, and ages."""
    found = record.measures["shares"]
    norms = [found[where][part] if where in found else None for where in ("batch", "memory") for part in ("pull", "push")]
    ages = found.get("age", {})
    return ["–" if x is None else f"{x:.3g}" for x in (*norms, ages.get("rows"), ages.get("valid negatives"))]


def _panel(title: str, y: str, lines: dict[str, tuple[list[float], list[float]]], **more: Any) -> dict[str, Any]:
    colours = {BARE: 5, SUM: 1, LEVEL: 0}
    drawn = [{"label": k, "x": x, "y": v, "colour": colours[k], "marker": False} for k, (x, v) in lines.items() if x]
    return {"title": title, "x": "iteration", "y": y, "lines": drawn, **more}


def _swept(study: Study, arms: dict[str, Arm], pushes: list[float]) -> dict[str, Any]:
    """R@1 by how much the push may weigh."""

    def recall(label: str) -> float:
        found = study.spread(arms[label])
        return 100 * found.mean if found else float("nan")

    swept = [recall(LEVEL if push == 1 else _pushed(push)) for push in pushes]
    ends = [pushes[0], pushes[-1]]
    lines = [
        {"label": "push at most ρ × pull", "x": pushes, "y": swept, "colour": 0},
        {"label": "no bound: the sum", "x": ends, "y": [recall(SUM)] * 2, "dashed": True, "marker": False, "colour": 1},
        {"label": "no memory", "x": ends, "y": [recall(BARE)] * 2, "dashed": True, "marker": False, "colour": 5},
    ]
    return {"title": "R@1 by the bound", "x": "ρ", "y": "R@1, %", "x_log": 10, "ticks": pushes, "lines": lines}


def _verdict(study: Study, arms: dict[str, Arm], first: dict[str, Record]) -> Claim:
    def recall(label: str) -> str:
        found = study.spread(arms[label])
        return percent(found.mean if found else None)

    told = (
        f"{study.setting.where}: summed, the memory's valid negatives weigh {_settled(ratio(first[SUM])):.2g} times its "
        f"positives late in training, and R@1 is {recall(SUM)} against {recall(BARE)} without memory and {recall(LEVEL)} "
        "balanced"
    )
    young = f"; summed with rows {YOUNGER} times younger it is {recall(YOUNG)}" if YOUNG in first else ""
    return Claim(f"{told}{young} (held-out training classes).")


EXPERIMENTS = (Experiment("robustness-cause", "The cause", BEYOND, SETTINGS, cause_arms, draw_cause),)
