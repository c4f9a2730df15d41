"""Beyond the paper: the recipe `auto` beside the paper's two and beside no memory, with right labels and with some wrong ones,
what it was chosen from, and what it costs."""

import math
from collections.abc import Sequence
from typing import Any

from xbm.study.paper.arms import SUMMED
from xbm.study.paper.blocks import NONE, Block, Claim, Table, spread
from xbm.study.paper.cost import SHORT
from xbm.study.paper.experiment import HOLDOUT, OFF, Arm, Experiment, Setting, base, grid
from xbm.study.paper.losses import choices
from xbm.study.paper.study import Spread, Study, paired
from xbm.train.config import flat
from xbm.train.presets import RECIPES, preset

LOSSES = {"contrastive": "contrastive", "MS": "multi_similarity"}
AVERAGED = {"loss.reduction": "mean"}
BALANCED = {"loss.reduction": "balanced"}
NO_MEMORY = {"summed": SUMMED, "averaged": AVERAGED}  # the better one on the held-out classes is the one compared with
QUEUE = {"memory.update": "queue", "memory.momentum": None, "memory.ratio": 1.0}
KEYED = {"memory.update": "moving_average", "memory.ratio": 1.0}
AT_ONCE = {"memory.start": 0, "memory.fill": False}
NOISE = {"data.noise": 0.1}
SETTINGS = ("cars", "omniglot", "glyphs")
OURS = "auto"


def recipes(setting: Setting) -> dict[str, dict[str, Any]]:
    """What each recipe says of loss and memory; schedule, augmentation and pooling are the same for all."""
    memory = {name: value for name, value in flat(preset(setting.data)).items() if name.startswith("memory.")}
    return {
        "paper": {**memory, **SUMMED, "memory.batch_weight": 0.0},
        "official": {**QUEUE, **SUMMED, "memory.fill": False, "memory.batch_weight": 1.0},
        OURS: RECIPES[OURS],
    }


def recipe_arms(setting: Setting) -> list[Arm]:
    """Each loss without memory and with each recipe."""
    arms = []
    for loss, name in LOSSES.items():
        named = {"loss.name": name}
        arms += [Arm(label, {**named, **OFF, **reduction}) for label, reduction in _bare(loss).items()]
        arms += [Arm(f"{loss}, {recipe}", {**settings, **named}) for recipe, settings in recipes(setting).items()]
    return arms


def noise_arms(setting: Setting) -> list[Arm]:
    """The same with wrong labels among those trained on, at the learning rates chosen without."""
    return [Arm(arm.label, {**arm.settings, **NOISE}, {"data.noise": 0.0}) for arm in recipe_arms(setting)]


def held_out(setting: Setting, kinds: dict[str, dict[str, Any]]) -> list[Arm]:
    """Arms that are scored on held-out training classes only, at the middle learning rate."""
    rates = grid(setting)
    usual = {"loss.name": "contrastive", **AT_ONCE, "data.holdout": HOLDOUT, "optim.lr": rates[len(rates) // 2]}
    return [Arm(label, {**usual, **kind}, choose=None) for label, kind in kinds.items()]


def candidate_arms(setting: Setting) -> list[Arm]:
    """What `auto` was chosen from: the memory is there from the start, and empty, where nothing else is said."""
    late = {"memory.start": base(setting).optim.iterations // 5, "memory.fill": True}
    ms = {"loss.name": LOSSES["MS"]}
    return held_out(setting, {
        **{label: {**OFF, **reduction} for label, reduction in _bare("contrastive").items()},
        "contrastive, queue, summed": {**QUEUE, **SUMMED},
        "contrastive, queue, averaged": {**QUEUE, **AVERAGED},
        "contrastive, queue, balanced": {**QUEUE, **BALANCED},
        "contrastive, queue, balanced, after a fifth": {**QUEUE, **BALANCED, **late},
        "contrastive, moving average 0.9, summed": {**KEYED, **SUMMED, "memory.momentum": 0.9},
        "contrastive, moving average 0.5, balanced": {**KEYED, **BALANCED, "memory.momentum": 0.5},
        "contrastive, moving average 0.9, balanced": {**KEYED, **BALANCED, "memory.momentum": 0.9},
        "MS, no memory": {**ms, **OFF},
        "MS, queue": {**ms, **QUEUE},
        "MS, queue, after a fifth": {**ms, **QUEUE, **late},
        "MS, moving average 0.9": {**ms, **KEYED, "memory.momentum": 0.9},
    })  # fmt: skip


def cost_arms(setting: Setting) -> list[Arm]:
    """Short runs to be timed: the plain queue, and `auto`."""
    kinds = {"plain queue": {**QUEUE, **SUMMED, "memory.batch_weight": 1.0}, OURS: RECIPES[OURS]}
    return [
        Arm(label, {"loss.name": "contrastive", **kind, **SHORT}, choose=None, measures=("cost",), seeds=1)
        for label, kind in kinds.items()
    ]


def _bare(loss: str) -> dict[str, dict[str, Any]]:
    """The ways to train without memory: multi-similarity has one."""
    if loss != "contrastive":
        return {f"{loss}, no memory": {}}
    return {f"{loss}, no memory, {how}": reduction for how, reduction in NO_MEMORY.items()}


# ------------------------------------------------------------------ drawing


def baseline(study: Study, loss: str) -> Arm | None:
    """No memory with the better reduction on the held-out classes; None as long as something is not chosen."""
    arms = [arm for arm in study.arms if arm.label in _bare(loss)]
    found = [(choice, arm) for arm in arms if (choice := study.choice(arm)) is not None]
    return max(found, key=lambda pair: max(pair[0].scores))[1] if len(found) == len(arms) else None


def draw_recipes(data: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 of every recipe, and seed by seed what `auto` adds to no memory and to the best of the others."""
    rows, said = [], list[Block]()
    for study in studies:
        for loss in LOSSES:
            bare = baseline(study, loss)
            if bare is None:
                continue
            arms = {arm.label.removeprefix(f"{loss}, "): arm for arm in study.arms if arm.label.startswith(f"{loss}, ")}
            found = {"no memory": study.spread(bare)}
            found |= {name: study.spread(arms[name]) for name in recipes(study.setting)}
            gain, ahead = _gain(found, "no memory"), _gain(found, _best(found))
            how = bare.label.rpartition(", ")[2]
            rows.append([
                f"{study.setting.trunk}, {loss}", *(spread(each) for each in found.values()),
                how if how in NO_MEMORY else NONE, spread(gain, sign=True), spread(ahead, sign=True),
            ])  # fmt: skip
            if gain is not None and ahead is not None:
                said.append(_verdict(f"{study.setting.where}, {loss}", gain, ahead, _best(found)))
    header = ["R@1, %", "no memory", *RECIPES_SHOWN, "no memory is", "auto − no memory", "auto − best of the others"]
    return [Table(header, rows), *said, *(block for study in studies for block in choices(study))] if rows else []


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
    clear = "ahead by more than" if gain.mean > gain.error else "not ahead by more than"
    beside = "" if best == "no memory" else f", and {spread(ahead, sign=True)} from the best of the others, `{best}`"
    return Claim(f"{told}, {clear} one standard error{beside} ({len(gain)} seeds).")


def draw_candidates(data: str, studies: Sequence[Study]) -> list[Block]:
    header = ["R@1, %, held-out training classes", *(study.setting.trunk for study in studies)]
    labels = [arm.label for arm in studies[0].arms] if studies else []
    rows = [[label, *(spread(study.spread(study.arms[k])) for study in studies)] for k, label in enumerate(labels)]
    rates = ", ".join(f"{study.setting.trunk} {grid(study.setting)[1]:g}" for study in studies)
    said = (
        f"{HOLDOUT:.0%} of the training classes were held out; one learning rate for all rows ({rates}), as many runs for each."
    )
    return [Table(header, rows), said] if rows else []


def draw_cost(data: str, studies: Sequence[Study]) -> list[Block]:
    rows = []
    for study in studies:
        taken = [run.measures["cost"]["seconds_per_iteration"] for arm in study.arms for run in study.runs(arm)[:1]]
        if len(taken) == 2:
            plain, ours = taken
            extra = f"{100 * (ours / plain - 1):+.1f} %".replace("-", "−")
            rows.append([study.setting.trunk, f"{1000 * plain:.2f} ms", f"{1000 * ours:.2f} ms", extra])
    return [Table([f"{data}, a training step", "plain queue", OURS, "more"], rows)] if rows else []


RECIPES_SHOWN = ("paper", "official", OURS)
BEYOND = "beyond the paper"
EXPERIMENTS = (
    Experiment("robustness", "Every recipe, and no memory", BEYOND, SETTINGS, recipe_arms, draw_recipes),
    Experiment(
        "robustness-noise", "A tenth of the training labels wrong", BEYOND, ("cars", "glyphs"), noise_arms, draw_recipes
    ),
    Experiment("robustness-choice", "What auto was chosen from", BEYOND, SETTINGS, candidate_arms, draw_candidates),
    Experiment("robustness-cost", "What auto costs", BEYOND, ("cars",), cost_arms, draw_cost),
)  # fmt: skip
