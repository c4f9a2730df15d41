"""Beyond the paper: why its memory hurts some networks. Changes the weight of the memory's negatives relative to its
positives, and the age of its rows, each on its own."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paper.experiment import OFF, SMALL, SUMMED, Arm, Experiment, Setting
from paper.experiments.negatives import next_batch
from paper.experiments.robustness import BALANCED, BEYOND, FULL_QUEUE, SETTINGS, held_out
from paper.page import Block, Claim, Figure, Table, plus_minus
from paper.record import Record, digits
from paper.study import Study
from xbm.losses import LOSSES, ContrastiveLoss, PairLoss
from xbm_app.report.writing import MISSING
from xbm_app.train.config import override
from xbm_app.train.dataset import read_run
from xbm_app.train.losses import pair_loss
from xbm_app.train.state import RunState

PUSHED = "contrastive_pushed"
PUSHES = (0.5, 0.8, 1.5, 3.0, 10.0)  # ρ; 1 is the balanced loss, no bound is the sum
YOUNGER = 8
NO_MEMORY, SUM, LEVEL, YOUNG = "no memory", "summed", "balanced", f"summed, rows {YOUNGER} times younger"

SHARES = (
    "Components of an anchor's gradient at the end of training, seed 0: mean norms of the pull of positives and of the push of "
    "valid negatives; and the median age of the memory's rows and of its valid negatives, in batches enqueued since:"
)


class PushedContrastiveLoss(ContrastiveLoss):
    """The balanced contrastive loss with a variable bound: an anchor's negatives weigh at most ρ times its positives.

    L_i = Σ_P (1 − S) + c Σ_N [S − λ]₊, with c ≤ 1 the largest factor within the bound. `ContrastiveLoss` has ρ = 1. Only the
    reduction "balanced" is changed.

    Args:
        push: ρ.
    """

    name = PUSHED
    hyperparameters: ClassVar = {"margin": float, "push": float}

    def __init__(self, margin: float = 0.5, push: float = 1.0, **options: Any) -> None:
        super().__init__(margin, **options)
        self.push = push

    def _bound(self, pull: Tensor, push: Tensor) -> Tensor:
        """(m,): c, from the weights of both sides; an anchor without positives is treated as if it had one."""
        return (self.push * pull.clamp(min=1) / push.clamp(min=1)).clamp(max=1)

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        if self.reduction != "balanced":
            return super().dense(S, positive, negative)
        valid = negative & (self.margin < S)
        c = self._bound(positive.sum(1).to(S.dtype), valid.sum(1).to(S.dtype))
        return ((1 - S) * positive).sum(1) + c * ((S - self.margin) * valid).sum(1)

    def combine(self, p: Any, n: Any) -> Any:
        combined = super().combine(p, n)
        if self.reduction != "balanced":
            return combined
        c = self._bound(p.weight, n.weight)
        return combined._replace(loss=p.value + c * n.value, negative_sum=c)


LOSSES[PUSHED] = PushedContrastiveLoss  # so that configs can name it


def cause_arms(setting: Setting) -> list[Arm]:
    """Arms that differ in the memory only; the batch loss is always summed."""
    kinds: dict[str, dict[str, Any]] = {NO_MEMORY: OFF, SUM: FULL_QUEUE, LEVEL: {**FULL_QUEUE, **BALANCED}}
    if setting.data in SMALL:
        kinds[YOUNG] = {**kinds[SUM], "memory.updates_per_step": YOUNGER}
        for push in PUSHES:
            kinds[_pushed(push)] = {**kinds[LEVEL], "loss.name": PUSHED, "loss.options": {"push": push}}
    return held_out(setting, {label: {**SUMMED, **kind} for label, kind in kinds.items()}, ("shares",))


def _pushed(push: float) -> str:
    return f"push at most {push:g} × pull"


# ------------------------------------------------------------------ the components of a gradient


def measure_shares(run: RunState) -> dict[str, Any]:
    """The components of an anchor's gradient: pull and push, from the batch and from the memory.

    Returns:
        batch, memory: mean norms and total weights of pull and push. age: median age of the rows and of the valid negatives.
        false: share of the memory's push that acts on images with the anchor's true class, which `data.noise` mislabeled.
    """
    right = read_run(override(run.config, {"data.noise": 0.0}), run.folder)
    return gradient_shares(run, right.train.labels)


@torch.no_grad()
def gradient_shares(run: RunState, true_labels: np.ndarray) -> dict[str, Any]:
    """See `measure_shares`."""
    ids, anchors, labels = next_batch(run)
    truth = torch.from_numpy(np.asarray(true_labels))
    batch_loss, memory_loss = pair_loss(run.config), pair_loss(run.config, run.config.reduction)
    shares: dict[str, Any] = {"batch": _components(batch_loss, anchors, labels[ids], ids, anchors, labels[ids], ids)[0]}
    if run.memory is not None and len(run.memory):
        rows, row_ids = run.memory.embeddings.float().cpu(), run.memory.ids.cpu()
        shares["memory"], push = _components(memory_loss, anchors, labels[ids], ids, rows, labels[row_ids], row_ids)
        ages = run.memory.ages.cpu()
        same = truth[ids][:, None] == truth[row_ids]
        valid = (push > 0).nonzero()[:, 1]
        shares["age"] = {"rows": float(ages.median()), "valid negatives": float(ages[valid].median()) if len(valid) else None}
        shares["false"] = digits((push * same).sum() / push.sum()) if bool(push.sum() > 0) else None
    return shares


def _components(
    loss: PairLoss, anchors: Tensor, labels: Tensor, ids: Tensor, rows: Tensor, row_labels: Tensor, row_ids: Tensor
) -> tuple[dict[str, float], Tensor]:
    """Mean norms and weights of pull and push, and the weights of the negatives (m, M)."""
    same, other = labels[:, None] == row_labels, ids[:, None] != row_ids
    weights = loss.weights(anchors @ rows.T, same & other, ~same & other)
    sides = {"pull": weights * same, "push": weights * ~same}
    norms = {name: digits((side @ rows).norm(dim=1).mean()) for name, side in sides.items()}
    return {**norms, **{f"{name}_weight": digits(side.sum(1).mean()) for name, side in sides.items()}}, sides["push"]


# ------------------------------------------------------------------ drawing


def draw_cause(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        arms = {arm.label: arm for arm in study.arms}
        first = {label: runs[0] for label, arm in arms.items() if (runs := study.finished(arm))}
        if not {NO_MEMORY, SUM, LEVEL} <= first.keys():
            continue
        recall = {label: 100 * scores.mean for label, arm in arms.items() if (scores := study.spread(arm))}
        ratios = {label: ratio(first[label]) for label in (SUM, LEVEL)}
        drifts, ranks = (
            {label: first[label].curve(name) for label in (NO_MEMORY, SUM, LEVEL)} for name in ("drift_100", "effective_rank")
        )
        panels = [
            _panel("Negatives over positives, memory", "valid pairs, ratio", ratios, y_log=True),
            _panel("Drift over 100 steps", "squared distance", drifts),
            _panel("Effective rank of a batch", "", ranks),
        ]
        pushes = [push for push in PUSHES if _pushed(push) in first]
        if pushes:
            panels.append(_recall_by_bound(recall, sorted([1.0, *pushes])))
        caption = f"{study.setting.label}, contrastive, seed 0: with the memory's pairs summed, and balanced."
        blocks.append(Figure(f"cause_{study.setting.slug}", {"panels": panels}, caption))
        rows = [[label, plus_minus(study.spread(arms[label])), *_late(run)] for label, run in first.items()]
        header = ["held-out training classes", "R@1, %", "negatives over positives", "drift over 100 steps", "effective rank"]
        blocks += [Table(header, rows), _claim(study, recall, first)]
        components = [[label, *_component_cells(run)] for label, run in first.items() if run.measures.get("shares")]
        if components:
            header = ["", "pull, batch", "push, batch", "pull, memory", "push, memory", "age of rows", "age of those that push"]
            blocks += [SHARES, Table(header, components)]
    if blocks:
        blocks.append(
            "All but the first two columns are medians over the last quarter of training, seed 0, of the memory's valid pairs."
        )
    return blocks


def ratio(record: Record) -> tuple[list[float], list[float]]:
    """(steps, valid negatives over valid positives of the memory)."""
    positives = dict(zip(*record.curve("valid_positives_memory")))
    negatives = zip(*record.curve("valid_negatives_memory"))
    points = [(step, count / positives[step]) for step, count in negatives if positives.get(step) and count]
    return [step for step, _ in points], [value for _, value in points]


def _last_quarter(curve: tuple[list[float], list[float]]) -> float:
    values = curve[1][len(curve[1]) * 3 // 4 :]
    return float(np.median(values)) if values else float("nan")


def _late(record: Record) -> list[str]:
    curves = (ratio(record), record.curve("drift_100"), record.curve("effective_rank"))
    return [MISSING if value != value else f"{value:.3g}" for value in map(_last_quarter, curves)]


def _component_cells(record: Record) -> list[str]:
    """Norms of the components of the gradient, and ages."""
    shares = record.measures["shares"]
    norms = [shares[where][side] if where in shares else None for where in ("batch", "memory") for side in ("pull", "push")]
    ages = shares.get("age", {})
    values = (*norms, ages.get("rows"), ages.get("valid negatives"))
    return [MISSING if value is None else f"{value:.3g}" for value in values]


def _panel(title: str, y: str, lines: dict[str, tuple[list[float], list[float]]], **more: Any) -> dict[str, Any]:
    colours = {NO_MEMORY: 5, SUM: 1, LEVEL: 0}
    drawn = [{"label": k, "x": x, "y": v, "colour": colours[k], "marker": False} for k, (x, v) in lines.items() if x]
    return {"title": title, "x": "iteration", "y": y, "lines": drawn, **more}


def _recall_by_bound(recall: dict[str, float], pushes: list[float]) -> dict[str, Any]:
    by_bound = [recall[LEVEL if push == 1 else _pushed(push)] for push in pushes]
    ends = [pushes[0], pushes[-1]]
    lines = [
        {"label": "push at most ρ × pull", "x": pushes, "y": by_bound, "colour": 0},
        {"label": "no bound: the sum", "x": ends, "y": [recall[SUM]] * 2, "dashed": True, "marker": False, "colour": 1},
        {"label": "no memory", "x": ends, "y": [recall[NO_MEMORY]] * 2, "dashed": True, "marker": False, "colour": 5},
    ]
    return {"title": "R@1 by the bound", "x": "ρ", "y": "R@1, %", "x_log": 10, "ticks": pushes, "lines": lines}


def _claim(study: Study, recall: dict[str, float], first: dict[str, Record]) -> Claim:
    text = (
        f"{study.setting.where}: with a summed memory, valid negatives weigh {_last_quarter(ratio(first[SUM])):.2g} times as "
        f"much as positives late in training, and R@1 is {recall[SUM]:.1f}; it is {recall[NO_MEMORY]:.1f} without memory and "
        f"{recall[LEVEL]:.1f} with a balanced one"
    )
    young = f"; with a summed memory whose rows are {YOUNGER} times younger it is {recall[YOUNG]:.1f}" if YOUNG in first else ""
    return Claim(f"{text}{young} (held-out training classes).")


EXPERIMENTS = (Experiment("robustness-cause", "The cause", BEYOND, SETTINGS, cause_arms, draw_cause),)
