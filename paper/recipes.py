"""Beyond the paper: the recipe `auto` beside the paper's two and beside no memory, with right labels and with some wrong ones,
what it was chosen from, and what it costs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paper.arms import PLAIN_QUEUE, SUMMED
from paper.blocks import Block, Claim, Table, percent, spread
from paper.cost import SHORT
from paper.experiment import CHOOSING_SEED, HOLDOUT, OFF, Arm, Experiment, Setting, base, grid
from paper.study import Spread, Study, paired
from xbm_app.train.config import flat
from xbm_app.train.presets import FULL_QUEUE, KEYED, SLOTS, preset, recipe_of

LOSSES = {"contrastive": "contrastive", "MS": "multi_similarity"}
AVERAGED = {"loss.reduction": "mean"}
BALANCED = {"memory.reduction": "balanced"}  # the batch's loss is that of the base config, without memory the better one
REDUCTIONS = ("loss.reduction", ("sum", "mean"))  # without memory: the better one on the held-out classes is compared with
BARE = "no memory"
ALONE = {"memory.batch_weight": 0.0}  # Algorithm 1: the loss against the memory takes the place of the batch's
AT_ONCE = {"memory.start": 0, "memory.fill": False}
NOISE = {"data.noise": 0.1}
SETTINGS = ("cars", "omniglot", "glyphs")
OURS = "auto"


def recipes(setting: Setting) -> dict[str, dict[str, Any]]:
    """What each recipe says of loss and memory; schedule, augmentation and pooling are the same for all."""
    memory = {name: value for name, value in flat(preset(setting.data)).items() if name.startswith("memory.")}
    return {
        "paper": {**memory, **SUMMED, **ALONE},
        "official": {**PLAIN_QUEUE, "memory.fill": False},
        OURS: recipe_of(OURS, setting.weights, setting.data),
    }


def recipe_arms(setting: Setting) -> list[Arm]:
    """Each loss without memory and with each recipe, at one learning rate. No memory takes the better reduction of two."""
    arms = []
    for loss, name in LOSSES.items():
        named = {"loss.name": name, **rate(setting)}
        bare = Arm(f"{loss}, {BARE}", {**named, **OFF}, choose=None)
        arms.append(replace(bare, choose={}, among=REDUCTIONS) if loss == "contrastive" else bare)
        arms += [Arm(f"{loss}, {each}", {**settings, **named}, choose=None) for each, settings in recipes(setting).items()]
    return arms


def noise_arms(setting: Setting, share: float = NOISE["data.noise"]) -> list[Arm]:
    """No memory and `auto` with wrong labels among those trained on; what was chosen was chosen with right ones."""
    return [
        replace(arm, settings={**arm.settings, "data.noise": share}, choose=None if arm.choose is None else {"data.noise": 0.0})
        for arm in recipe_arms(setting)
        if arm.label.endswith((BARE, OURS))
    ]


def rate(setting: Setting) -> dict[str, Any]:
    """The same learning rate for all: the middle one of those that other experiments choose from."""
    rates = grid(setting)
    return {"optim.lr": rates[len(rates) // 2]}


def held_out(setting: Setting, kinds: dict[str, dict[str, Any]], measures: tuple[str, ...] = ()) -> list[Arm]:
    """Arms that are scored on held-out training classes only, at the middle learning rate."""
    usual = {"loss.name": "contrastive", **AT_ONCE, **rate(setting), "data.holdout": HOLDOUT}
    return [Arm(label, {**usual, **kind}, choose=None, measures=measures) for label, kind in kinds.items()]


def candidate_arms(setting: Setting) -> list[Arm]:
    """What `auto` was chosen from: the memory is there from the start, and empty, where nothing else is said."""
    late = {"memory.start": base(setting).optim.iterations // 5, "memory.fill": True}
    ms = {"loss.name": LOSSES["MS"]}
    paper = recipes(setting)["paper"]
    more = pretrained_candidates() if setting.weights != "none" else {}
    return held_out(setting, {
        "contrastive, queue, balanced": {**FULL_QUEUE, **BALANCED},
        "contrastive, no memory, summed": {**OFF, **SUMMED},
        "contrastive, no memory, averaged": {**OFF, **AVERAGED},
        "contrastive, queue, summed": {**FULL_QUEUE, **SUMMED},
        "contrastive, queue, averaged": {**FULL_QUEUE, **AVERAGED},
        "contrastive, queue, balanced, batch summed": {**FULL_QUEUE, **SUMMED, **BALANCED},
        "contrastive, queue, balanced, batch summed, after a fifth": {**FULL_QUEUE, **SUMMED, **BALANCED, **late},
        "contrastive, queue, balanced, batch too": {**FULL_QUEUE, "loss.reduction": "balanced"},
        "contrastive, queue, balanced, after a fifth": {**FULL_QUEUE, **BALANCED, **late},
        "contrastive, moving average 0.9, summed": {**SLOTS, **SUMMED},
        "contrastive, moving average 0.9, summed, no loss of the batch": {**SLOTS, **SUMMED, **ALONE},
        "contrastive, moving average 0.9, balanced": {**SLOTS, **BALANCED},
        "contrastive, moving average 0.9, balanced, batch summed": {**SLOTS, **SUMMED, **BALANCED},
        "contrastive, as `paper`": paper,
        "MS, no memory": {**ms, **OFF},
        "MS, queue": {**ms, **FULL_QUEUE},
        "MS, queue, after a fifth": {**ms, **FULL_QUEUE, **late},
        "MS, moving average 0.9": {**ms, **SLOTS},
        "MS, moving average 0.9, no loss of the batch": {**ms, **SLOTS, **ALONE},
        "MS, as `paper`": {**paper, **ms},
        **more,
    })  # fmt: skip


def pretrained_candidates() -> dict[str, dict[str, Any]]:
    """What was tried besides where a trunk is pretrained: memories that begin full, labels in doubt, rows that descend."""
    full, doubt, half = {"memory.fill": True}, {"memory.doubt": "skip"}, {"memory.dtype": "bfloat16"}
    descending = {**KEYED, "memory.alpha": 0.1, "memory.batch_weight": 1.0}
    doubted, full_and_doubted = {**SLOTS, **doubt}, {**SLOTS, **full, **doubt}
    kinds: dict[str, dict[str, Any]] = {
        "moving average 0.9, filled": {**SLOTS, **full},
        "moving average 0.9, labels doubted": doubted,
        "moving average 0.9, filled, labels doubted": full_and_doubted,
        "moving average 0.9, filled, labels doubted, rows of bfloat16": {**full_and_doubted, **half},
        "rows that descend": descending,
        "rows that descend, filled": {**descending, **full},
        "a tenth of the labels wrong, no memory": {**OFF, **NOISE},
        "a tenth of the labels wrong, moving average 0.9": {**SLOTS, **NOISE},
        "a tenth of the labels wrong, moving average 0.9, labels doubted": {**doubted, **NOISE},
        "a tenth of the labels wrong, moving average 0.9, filled, labels doubted": {**full_and_doubted, **NOISE},
    }
    return {
        f"{loss}, {label}": {**kind, **SUMMED, "loss.name": name}
        for loss, name in LOSSES.items()
        for label, kind in kinds.items()
    }


def earlier_arms(setting: Setting) -> list[Arm]:
    """What `auto` was before, where a trunk is pretrained: its memory began empty, and believed every label."""
    now = recipe_of(OURS, setting.weights, setting.data)
    before = {**now, "memory.fill": False, "memory.doubt": "keep", "memory.dtype": "auto", **rate(setting)}
    return [
        Arm(f"{loss}{told}", {**before, "loss.name": name, **noise}, choose=None)
        for loss, name in LOSSES.items()
        for told, noise in {"": {}, ", a tenth of the labels wrong": NOISE}.items()
    ]


def cost_arms(setting: Setting) -> list[Arm]:
    """A short run of `auto`, whose steps are then timed in turns with those of the plain queue."""
    settings = {"loss.name": "contrastive", **recipe_of(OURS, setting.weights, setting.data), **SHORT}
    return [Arm(OURS, settings, choose=None, measures=("beside_queue",), seeds=1)]


# ------------------------------------------------------------------ drawing


def draw_recipes(data: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 of every recipe, and seed by seed what `auto` adds to no memory and to the best of the others."""
    names = list(dict.fromkeys(arm.label.rpartition(", ")[2] for study in studies for arm in study.arms))
    rows, said = [], list[Block]()
    for study in studies:
        for loss in LOSSES:
            arms = {arm.label.removeprefix(f"{loss}, "): arm for arm in study.arms if arm.label.startswith(f"{loss}, ")}
            found = {name: study.spread(arms[name]) for name in names}
            gain, ahead = _gain(found, BARE), _gain(found, _best(found))
            cells = [f"{study.setting.trunk}, {loss}", *(spread(each) for each in found.values())]
            rows.append([*cells, spread(gain, sign=True), spread(ahead, sign=True)])
            if gain is not None and ahead is not None:
                said.append(_verdict(f"{study.setting.where}, {loss}", gain, ahead, _best(found)))
            choice = study.choice(arms[BARE])
            if choice is not None:
                tried = ", ".join(f"{how} {percent(score)}" for how, score in zip(choice.tried, choice.scores))
                said.append(
                    f"{study.setting.where}, {loss}: without memory pairs are reduced by `{choice.picked}`, the better of "
                    f"two on {HOLDOUT:.0%} of the training classes, held out, seed {CHOOSING_SEED} (R@1, %: {tried})."
                )
    header = ["R@1, %", *names, "auto − no memory", "auto − best of the others"]
    rates = ", ".join(f"{study.setting.trunk} {rate(study.setting)['optim.lr']:g}" for study in studies)
    return [Table(header, rows), f"One learning rate for all ({rates}).", *said] if rows else []


def _gain(found: dict[str, Spread | None], name: str) -> Spread | None:
    one, ours = found.get(name), found[OURS]
    return None if one is None or ours is None else paired(one, ours)


def _best(found: dict[str, Spread | None]) -> str:
    """The best of the others by its mean."""
    return max((name for name in found if name != OURS), key=lambda name: each.mean if (each := found[name]) else -1.0)


def _verdict(where: str, gain: Spread, ahead: Spread, best: str) -> Claim:
    told = f"{where}: `auto` is {spread(gain, sign=True)} points from no memory"
    if math.isnan(gain.error):
        return Claim(f"{told}; one seed, so nothing is known of its error.")
    clear = "ahead by more than" if gain.mean > gain.error else "behind by more than" if gain.mean < -gain.error else "within"
    beside = "" if best == BARE else f", and {spread(ahead, sign=True)} from the best of the others, `{best}`"
    return Claim(f"{told}, {clear} one standard error{beside} ({len(gain)} seeds).")


def _by_trunk(corner: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 of every arm, a column a trunk."""
    labels = [arm.label for arm in studies[0].arms] if studies else []
    rows = [[label, *(spread(study.spread(study.arms[k])) for study in studies)] for k, label in enumerate(labels)]
    return [Table([corner, *(study.setting.trunk for study in studies)], rows)] if rows else []


def draw_candidates(data: str, studies: Sequence[Study]) -> list[Block]:
    rates = ", ".join(f"{study.setting.trunk} {rate(study.setting)['optim.lr']:g}" for study in studies)
    said = f"{HOLDOUT:.0%} of the training classes were held out; one learning rate for all rows ({rates})."
    table = _by_trunk("R@1, %, held-out training classes", studies)
    return [*table, said] if table else []


def draw_earlier(data: str, studies: Sequence[Study]) -> list[Block]:
    return _by_trunk("R@1, %, test classes", studies)


def _milliseconds(seconds: float) -> str:
    found = 1000 * seconds
    return f"{found:.2f} ms" if found >= 1 else f"{found:.3f} ms"  # a hundredth of half a millisecond is two per cent


def draw_cost(data: str, studies: Sequence[Study]) -> list[Block]:
    rows = []
    for study in studies:
        for run in (run for arm in study.arms for run in study.finished(arm)[:1]):
            taken = run.measures["beside_queue"]
            more = sorted(100 * (ours / plain - 1) for plain, ours in zip(taken["queue"], taken["ours"]))
            medians = [_milliseconds(statistics.median(taken[name])) for name in ("queue", "ours")]
            extra = f"{statistics.median(more):+.1f} % ({more[0]:+.1f} to {more[-1]:+.1f})".replace("-", "−")
            rows.append([study.setting.trunk, run.values["device"], *medians, extra, str(len(more))])
    header = [f"{data}, a training step", "device", "plain queue", OURS, "more: median (least to most)", "turns"]
    said = "Both train in one process, in turns, after a quarter of their steps; the median of the turns."
    return [Table(header, rows), said] if rows else []


BEYOND = "beyond the paper"
EXPERIMENTS = (
    Experiment("robustness", "Every recipe, and no memory", BEYOND, SETTINGS, recipe_arms, draw_recipes),
    Experiment(
        "robustness-noise", "A tenth of the training labels wrong", BEYOND, ("cars", "glyphs"), noise_arms, draw_recipes
    ),
    Experiment(
        "robustness-noise-20", "A fifth of the training labels wrong", BEYOND, ("cars", "glyphs"),
        partial(noise_arms, share=0.2), draw_recipes,
    ),
    Experiment(
        "robustness-noise-30", "Three tenths of the training labels wrong", BEYOND, ("cars", "glyphs"),
        partial(noise_arms, share=0.3), draw_recipes,
    ),
    Experiment("robustness-before", "What auto was before", BEYOND, ("cars",), earlier_arms, draw_earlier, elsewhere=False),
    Experiment("robustness-choice", "What auto was chosen from", BEYOND, SETTINGS, candidate_arms, draw_candidates),
    Experiment("robustness-cost", "What auto costs", BEYOND, ("cars", "omniglot"), cost_arms, draw_cost),
)  # fmt: skip
