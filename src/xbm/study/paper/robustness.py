"""Beyond the paper: where its memory hurts and why, and the recipe `auto` beside the paper's two and no memory."""

from collections.abc import Sequence
from typing import Any

from xbm.study.paper.arms import SUMMED
from xbm.study.paper.blocks import Block
from xbm.study.paper.experiment import HOLDOUT, OFF, Arm, Experiment, Setting, base, grid
from xbm.study.paper.study import Study
from xbm.train.config import flat
from xbm.train.presets import RECIPES, preset

LOSSES = {"contrastive": "contrastive", "MS": "multi_similarity"}
AVERAGED = {"loss.reduction": "mean"}
BALANCED = {"loss.reduction": "balanced"}
NO_MEMORY = {"summed": SUMMED, "averaged": AVERAGED}  # the better one on the held-out classes is the one compared with
KEYED = {"memory.update": "moving_average", "memory.ratio": 1.0}
NOISE = {"data.noise": 0.1}
SETTINGS = ("cars", "omniglot", "glyphs")


def recipes(setting: Setting) -> dict[str, dict[str, Any]]:
    """What each recipe says of loss and memory; schedule, augmentation and pooling are the same for all."""
    memory = {name: value for name, value in flat(preset(setting.data)).items() if name.startswith("memory.")}
    official = {"memory.update": "queue", "memory.momentum": None, "memory.ratio": 1.0, "memory.fill": False}
    return {
        "paper": {**memory, **SUMMED, "memory.batch_weight": 0.0},
        "official": {**official, **SUMMED, "memory.batch_weight": 1.0},
        "auto": RECIPES["auto"],
    }


def recipe_arms(setting: Setting) -> list[Arm]:
    """Each loss without memory and with each recipe."""
    arms = []
    for loss, name in LOSSES.items():
        named = {"loss.name": name}
        bare = NO_MEMORY if loss == "contrastive" else {"": {}}
        arms += [Arm(_bare(loss, how), {**named, **OFF, **reduction}) for how, reduction in bare.items()]
        arms += [Arm(f"{loss}, {recipe}", {**settings, **named}) for recipe, settings in recipes(setting).items()]
    return arms


def noise_arms(setting: Setting) -> list[Arm]:
    """The same with wrong labels among those trained on, at the learning rates chosen without."""
    return [
        Arm(arm.label, {**arm.settings, **NOISE}, {"data.noise": 0.0})
        for arm in recipe_arms(setting)
        if "paper" not in arm.label
    ]


def candidate_arms(setting: Setting) -> list[Arm]:
    """What `auto` was chosen from: all on held-out training classes, at the middle learning rate."""
    rates = grid(setting)
    split = {"data.holdout": HOLDOUT, "optim.lr": rates[len(rates) // 2]}
    late = {"memory.start": base(setting).optim.iterations // 5, "memory.fill": True}
    queue = {"memory.update": "queue", "memory.momentum": None, "memory.ratio": 1.0}
    kinds: dict[str, dict[str, Any]] = {
        **{_bare("contrastive", how): {**OFF, **reduction} for how, reduction in NO_MEMORY.items()},
        "contrastive, queue, summed": {**queue, **SUMMED},
        "contrastive, queue, averaged": {**queue, **AVERAGED},
        "contrastive, queue, balanced": {**queue, **BALANCED},
        "contrastive, queue, balanced, after a fifth": {**queue, **BALANCED, **late},
        "contrastive, moving average 0.9, summed": {**KEYED, **SUMMED, "memory.momentum": 0.9},
        "contrastive, moving average 0.5, balanced": {**KEYED, **BALANCED, "memory.momentum": 0.5},
        "contrastive, moving average 0.9, balanced": {**KEYED, **BALANCED, "memory.momentum": 0.9},
        "MS, no memory": {**OFF},
        "MS, queue": queue,
        "MS, moving average 0.9": {**KEYED, "memory.momentum": 0.9},
    }
    return [
        Arm(label, {"loss.name": LOSSES[label.split(",")[0]], **kind, **split}, choose=None) for label, kind in kinds.items()
    ]


def _bare(loss: str, how: str) -> str:
    return f"{loss}, no memory" + (f", {how}" if how else "")


def draw_recipes(data: str, studies: Sequence[Study]) -> list[Block]:
    return []


def draw_candidates(data: str, studies: Sequence[Study]) -> list[Block]:
    return []


EXPERIMENTS = (
    Experiment("robustness", "Recipes, and no memory", "beyond the paper", SETTINGS, recipe_arms, draw_recipes),
    Experiment(
        "robustness-noise", "A tenth of the training labels wrong", "beyond the paper", ("cars", "glyphs"), noise_arms,
        draw_recipes,
    ),
    Experiment(
        "robustness-choice", "What `auto` was chosen from", "beyond the paper", SETTINGS, candidate_arms, draw_candidates
    ),
)  # fmt: skip
