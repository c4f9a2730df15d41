"""Beyond the paper: where its memory hurts, why, and what to do about it.

The recipe `auto` compared with the paper's two recipes and with no memory, for correct and for noisy labels; the candidates it
was chosen from; and what it costs. Then the cause: the weight of the memory's negatives relative to its positives, and the age
of its rows, each changed on its own.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from paper.experiment import (
    CHOOSING_SEED,
    HOLDOUT,
    LOSSES,
    OFF,
    PLAIN_QUEUE,
    SMALL,
    SUMMED,
    Arm,
    Experiment,
    Setting,
    base,
    grid,
)
from paper.experiments.sizes import TIMED
from paper.experiments.updates import by_trunk
from paper.page import Block, Claim, Figure, Table, plus_minus
from paper.record import Record
from paper.statistics import Gain, in_words
from paper.study import Spread, Study, paired
from xbm.losses import LOSSES as LOSS_CLASSES
from xbm.losses import ContrastiveLoss
from xbm_app.report.writing import MISSING, percent
from xbm_app.train.config import flat
from xbm_app.train.presets import FULL_QUEUE, KEYED, SLOTS, preset, recipe_of

COMPARED = {label: LOSSES[label] for label in ("contrastive", "MS")}
AVERAGED = {"loss.reduction": "mean"}
BALANCED = {"memory.reduction": "balanced"}  # the batch loss is reduced as in the base config
REDUCTIONS = ("loss.reduction", ("sum", "mean"))  # without memory: the baseline is the better one on the held-out classes
NO_MEMORY = "no memory"
ALONE = {"memory.batch_weight": 0.0}  # Algorithm 1: the memory loss replaces the batch loss
AT_ONCE = {"memory.start": 0, "memory.fill": False}
NOISE = {"data.noise": 0.1}
BEYOND, SETTINGS = "beyond the paper", ("cars", "omniglot", "glyphs")
OURS, PAPER = "auto", "paper"
PLAIN = "plain queue"  # the memory of the recipe `official`, without its schedule, size, pooling and augmentation


def recipes(setting: Setting) -> dict[str, dict[str, Any]]:
    """The loss and memory settings of each recipe; schedule, augmentation and pooling are the same for all."""
    memory = {name: value for name, value in flat(preset(setting.data)).items() if name.startswith("memory.")}
    return {
        PAPER: {**memory, **SUMMED, **ALONE},
        PLAIN: {**PLAIN_QUEUE, "memory.fill": False},
        OURS: recipe_of(OURS, setting.weights, setting.data),
    }


def recipe_arms(setting: Setting) -> list[Arm]:
    """Each loss without memory and with each recipe, at one learning rate. Without memory, the better of two reductions."""
    arms = []
    for loss, name in COMPARED.items():
        named = {"loss.name": name, **rate(setting)}
        bare = Arm(f"{loss}, {NO_MEMORY}", {**named, **OFF}, choose=None)
        arms.append(replace(bare, choose={}, among=REDUCTIONS) if loss == "contrastive" else bare)
        arms += [Arm(f"{loss}, {each}", {**settings, **named}, choose=None) for each, settings in recipes(setting).items()]
    return arms


def noise_arms(setting: Setting, share: float) -> list[Arm]:
    """No memory and `auto` with wrong training labels; the reduction is chosen with correct ones."""
    return [
        replace(arm, settings={**arm.settings, "data.noise": share}, choose=None if arm.choose is None else {"data.noise": 0.0})
        for arm in recipe_arms(setting)
        if arm.label.endswith((NO_MEMORY, OURS))
    ]


def rate(setting: Setting) -> dict[str, Any]:
    """One learning rate for all: the middle one of the grid."""
    rates = grid(setting)
    return {"optim.lr": rates[len(rates) // 2]}


def held_out(setting: Setting, kinds: dict[str, dict[str, Any]], measures: tuple[str, ...] = ()) -> list[Arm]:
    """Arms that are scored only on held-out training classes, at the middle learning rate."""
    usual = {"loss.name": "contrastive", **AT_ONCE, **rate(setting), "data.holdout": HOLDOUT}
    return [Arm(label, {**usual, **kind}, choose=None, measures=measures) for label, kind in kinds.items()]


def candidate_arms(setting: Setting) -> list[Arm]:
    """The candidates for `auto`. Unless stated otherwise, the memory is used from the start and starts empty."""
    late = {"memory.start": base(setting).optim.iterations // 5, "memory.fill": True}
    ms = {"loss.name": COMPARED["MS"]}
    paper = recipes(setting)[PAPER]
    more = pretrained_candidates() if setting.weights != "none" else {}
    return held_out(setting, {
        "contrastive, queue, balanced": {**FULL_QUEUE, **BALANCED},
        "contrastive, no memory, summed": {**OFF, **SUMMED},
        "contrastive, no memory, averaged": {**OFF, **AVERAGED},
        "contrastive, queue, summed": {**FULL_QUEUE, **SUMMED},
        "contrastive, queue, averaged": {**FULL_QUEUE, **AVERAGED},
        "contrastive, queue, balanced, batch loss summed": {**FULL_QUEUE, **SUMMED, **BALANCED},
        "contrastive, queue, balanced, batch loss summed, after a fifth of training": {
            **FULL_QUEUE, **SUMMED, **BALANCED, **late
        },
        "contrastive, queue, balanced, batch loss balanced too": {**FULL_QUEUE, "loss.reduction": "balanced"},
        "contrastive, queue, balanced, after a fifth of training": {**FULL_QUEUE, **BALANCED, **late},
        "contrastive, moving average 0.9, summed": {**SLOTS, **SUMMED},
        "contrastive, moving average 0.9, summed, no batch loss": {**SLOTS, **SUMMED, **ALONE},
        "contrastive, moving average 0.9, balanced": {**SLOTS, **BALANCED},
        "contrastive, moving average 0.9, balanced, batch loss summed": {**SLOTS, **SUMMED, **BALANCED},
        "contrastive, as `paper`": paper,
        "MS, no memory": {**ms, **OFF},
        "MS, queue": {**ms, **FULL_QUEUE},
        "MS, queue, after a fifth of training": {**ms, **FULL_QUEUE, **late},
        "MS, moving average 0.9": {**ms, **SLOTS},
        "MS, moving average 0.9, no batch loss": {**ms, **SLOTS, **ALONE},
        "MS, as `paper`": {**paper, **ms},
        **more,
    })  # fmt: skip


def pretrained_candidates() -> dict[str, dict[str, Any]]:
    """Further candidates for pretrained trunks: memories that start full, label-error detection, back-propagation to rows."""
    full, doubt, half = {"memory.fill": True}, {"memory.doubt": "skip"}, {"memory.dtype": "bfloat16"}
    descending = {**KEYED, "memory.alpha": 0.1, "memory.batch_weight": 1.0}
    doubted, full_and_doubted = {**SLOTS, **doubt}, {**SLOTS, **full, **doubt}
    kinds: dict[str, dict[str, Any]] = {
        "moving average 0.9, filled": {**SLOTS, **full},
        "moving average 0.9, label-error detection": doubted,
        "moving average 0.9, filled, label-error detection": full_and_doubted,
        "moving average 0.9, filled, label-error detection, bfloat16 rows": {**full_and_doubted, **half},
        "back-propagation": descending,
        "back-propagation, filled": {**descending, **full},
        "10 % wrong labels, no memory": {**OFF, **NOISE},
        "10 % wrong labels, moving average 0.9": {**SLOTS, **NOISE},
        "10 % wrong labels, moving average 0.9, label-error detection": {**doubted, **NOISE},
        "10 % wrong labels, moving average 0.9, filled, label-error detection": {**full_and_doubted, **NOISE},
    }
    return {
        f"{loss}, {label}": {**kind, **SUMMED, "loss.name": name}
        for loss, name in COMPARED.items()
        for label, kind in kinds.items()
    }


def earlier_arms(setting: Setting) -> list[Arm]:
    """The previous `auto` for pretrained trunks: its memory started empty and trusted every label."""
    now = recipe_of(OURS, setting.weights, setting.data)
    before = {**now, "memory.fill": False, "memory.doubt": "keep", "memory.dtype": "auto", **rate(setting)}
    return [
        Arm(f"{loss}{label}", {**before, "loss.name": name, **noise}, choose=None)
        for loss, name in COMPARED.items()
        for label, noise in {"": {}, ", 10 % wrong labels": NOISE}.items()
    ]


def cost_arms(setting: Setting) -> list[Arm]:
    """A short run of `auto`, whose steps are timed in alternation with those of a plain queue."""
    settings = {"loss.name": "contrastive", **recipe_of(OURS, setting.weights, setting.data), **TIMED}
    return [Arm(OURS, settings, choose=None, measures=("beside_queue",), seeds=1)]


# ------------------------------------------------------------------ drawing the recipes


def draw_recipes(data: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 of every recipe, and the gain of `auto` over no memory and over the best of the others, seed by seed."""
    names = list(dict.fromkeys(arm.label.rpartition(", ")[2] for study in studies for arm in study.arms))
    rows, notes = [], list[Block]()
    for study in studies:
        for loss in COMPARED:
            arms = {arm.label.removeprefix(f"{loss}, "): arm for arm in study.arms if arm.label.startswith(f"{loss}, ")}
            scores = {name: study.spread(arms[name]) for name in names}
            best = _best(scores)
            gain, lead = (paired(scores[name], scores[OURS]) for name in (NO_MEMORY, best))
            cells = [f"{study.setting.trunk}, {loss}", *map(plus_minus, scores.values())]
            rows.append([*cells, plus_minus(gain, sign=True), plus_minus(lead, sign=True)])
            if gain.gain and lead.gain:
                notes.append(_claim(f"{study.setting.where}, {loss}", gain.gain, lead.gain, best))
            behind = paired(scores[NO_MEMORY], scores.get(PAPER, Spread())).gain
            if behind and behind.sign < 0:
                notes.append(Claim(
                    f"{study.setting.where}, {loss}: the recipe `{PAPER}` is behind no memory: "
                    f"{percent(scores[NO_MEMORY].mean)} falls to {percent(scores[PAPER].mean)}, {in_words(behind)}."
                ))  # fmt: skip
            choice = study.choice(arms[NO_MEMORY])
            if choice is not None:
                tried = ", ".join(f"{name} {percent(score)}" for name, score in zip(choice.tried, choice.scores))
                notes.append(
                    f"{study.setting.where}, {loss}: without memory, pairs are reduced by `{choice.picked}`, the better of "
                    f"two on {HOLDOUT:.0%} of the training classes, held out, seed {CHOOSING_SEED} (R@1, %: {tried})."
                )
    header = ["R@1, %", *names, "auto − no memory", "auto − best of the others"]
    return [Table(header, rows), f"One learning rate for all ({_rates(studies)}).", *notes] if rows else []


def _best(scores: dict[str, Spread]) -> str:
    """The best of the others by its mean."""
    others = [name for name in scores if name != OURS]
    return max(others, key=lambda name: scores[name].mean if scores[name] else -1.0)


def _claim(where: str, gain: Gain, lead: Gain, best: str) -> Claim:
    text = f"{where}: `auto` is {in_words(gain)} from no memory"
    if not gain.tested:
        return Claim(f"{text}.")
    verdict = {1: "ahead", -1: "behind", 0: "no clear difference"}[gain.sign]
    others = "" if best == NO_MEMORY else f"; it is {in_words(lead)} from the best of the others, `{best}`"
    return Claim(f"{text}: {verdict}{others}.")


def _rates(studies: Sequence[Study]) -> str:
    return ", ".join(f"{study.setting.trunk} {rate(study.setting)['optim.lr']:g}" for study in studies)


def draw_candidates(data: str, studies: Sequence[Study]) -> list[Block]:
    note = f"{HOLDOUT:.0%} of the training classes were held out; one learning rate for all rows ({_rates(studies)})."
    table = by_trunk("R@1, %, held-out training classes", studies)
    return [*table, note] if table else []


def draw_earlier(data: str, studies: Sequence[Study]) -> list[Block]:
    return by_trunk("R@1, %, test classes", studies)


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.2f} ms" if value >= 1 else f"{value:.3f} ms"  # a hundredth of half a millisecond is two per cent


def draw_cost(data: str, studies: Sequence[Study]) -> list[Block]:
    rows = []
    for study in studies:
        for run in (run for arm in study.arms for run in study.finished(arm)[:1]):
            times = run.measures["beside_queue"]
            more = sorted(100 * (ours / plain - 1) for plain, ours in zip(times["queue"], times["ours"]))
            medians = [_milliseconds(statistics.median(times[name])) for name in ("queue", "ours")]
            extra = f"{statistics.median(more):+.1f} % ({more[0]:+.1f} to {more[-1]:+.1f})".replace("-", "−")
            rows.append([study.setting.trunk, run.values["device"], *medians, extra, str(len(more))])
    header = [f"{data}, a training step", "device", "plain queue", OURS, "more: median (least to most)", "turns"]
    note = (
        "Both are trained in alternation in one process; the first quarter of the steps is not timed. Medians over the turns."
    )
    return [Table(header, rows), note] if rows else []


# ------------------------------------------------------------------ the cause

PUSHED = "contrastive_pushed"
PUSHES = (0.5, 0.8, 1.5, 3.0, 10.0)  # ρ; 1 is the balanced loss, no bound is the sum
YOUNGER = 8
SUM, LEVEL, YOUNG = "summed", "balanced", f"summed, rows {YOUNGER} times younger"

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


LOSS_CLASSES[PUSHED] = PushedContrastiveLoss  # so that configs can name it


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


# ------------------------------------------------------------------ drawing the cause


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
        blocks += [Table(header, rows), _cause_claim(study, recall, first)]
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


def _cause_claim(study: Study, recall: dict[str, float], first: dict[str, Record]) -> Claim:
    text = (
        f"{study.setting.where}: with a summed memory, valid negatives weigh {_last_quarter(ratio(first[SUM])):.2g} times as "
        f"much as positives late in training, and R@1 is {recall[SUM]:.1f}; it is {recall[NO_MEMORY]:.1f} without memory and "
        f"{recall[LEVEL]:.1f} with a balanced one"
    )
    young = f"; with a summed memory whose rows are {YOUNGER} times younger it is {recall[YOUNG]:.1f}" if YOUNG in first else ""
    return Claim(f"{text}{young} (held-out training classes).")


def _noise_experiment(name: str, part: str, share: float) -> Experiment:
    title, arms = f"{part} of the training labels wrong", partial(noise_arms, share=share)
    return Experiment(name, title, BEYOND, ("cars", "glyphs"), arms, draw_recipes)


EXPERIMENTS = (
    Experiment("robustness-cause", "The cause", BEYOND, SETTINGS, cause_arms, draw_cause),
    Experiment("robustness", "Every recipe, and no memory", BEYOND, SETTINGS, recipe_arms, draw_recipes),
    _noise_experiment("robustness-noise", "A tenth", NOISE["data.noise"]),
    _noise_experiment("robustness-noise-20", "A fifth", 0.2),
    _noise_experiment("robustness-noise-30", "Three tenths", 0.3),
    Experiment("robustness-before", "What auto was before", BEYOND, ("cars",), earlier_arms, draw_earlier, elsewhere=False),
    Experiment("robustness-choice", "What auto was chosen from", BEYOND, SETTINGS, candidate_arms, draw_candidates),
    Experiment("robustness-cost", "What auto costs", BEYOND, ("cars", "omniglot"), cost_arms, draw_cost),
)  # fmt: skip
