"""Beyond the paper: the recipe `auto` compared with the paper's two recipes and with no memory, for correct and for noisy
labels; the candidates it was chosen from; and what it costs."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paper.experiment import CHOOSING_SEED, HOLDOUT, LOSSES, OFF, PLAIN_QUEUE, SUMMED, Arm, Experiment, Setting, base, grid
from paper.experiments.sizes import TIMED
from paper.experiments.updates import by_trunk
from paper.page import Block, Claim, Table, plus_minus
from paper.record import digits
from paper.statistics import Gain, in_words
from paper.study import Spread, Study, paired
from xbm_app.progress import Console
from xbm_app.report.writing import percent
from xbm_app.train.config import Config, flat, override
from xbm_app.train.dataset import read_run
from xbm_app.train.label_errors import ignore_label_errors
from xbm_app.train.loop import steps
from xbm_app.train.presets import FULL_QUEUE, KEYED, SLOTS, preset, recipe_of
from xbm_app.train.state import RunState

COMPARED = {label: LOSSES[label] for label in ("contrastive", "MS")}
AVERAGED = {"loss.reduction": "mean"}
BALANCED = {"memory.reduction": "balanced"}  # the batch loss is reduced as in the base config
REDUCTIONS = ("loss.reduction", ("sum", "mean"))  # without memory: the baseline is the better one on the held-out classes
NO_MEMORY = "no memory"
ALONE = {"memory.batch_weight": 0.0}  # Algorithm 1: the memory loss replaces the batch loss
AT_ONCE = {"memory.start": 0, "memory.fill": False}
NOISE = {"data.noise": 0.1}
SETTINGS = ("cars", "omniglot", "glyphs")
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


# ------------------------------------------------------------------ timing

TURNS = 12


class Steps:
    """Trains a config some steps at a time. Its memory, if it has one, is used from the first step."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.run = RunState(config, read_run(config, folder), folder)
        self.run.model.train()
        self.learn_next = steps(self.run, 0, Console(config.optim.iterations, 0, quiet=True))
        self.done = 0

    def seconds(self, count: int) -> float:
        """Makes the next `count` steps and returns the time per step, including the work queued on the device."""
        self._wait()
        start = time.perf_counter()
        for step in range(self.done, self.done + count):
            self.run.set_learning_rate(step)
            self.learn_next(step, self.run.memory is not None)
            if self.run.label_memory is not None and (step + 1) % self.run.label_check_every == 0:
                ignore_label_errors(self.run.label_memory, self.run.dataset.train.num_classes)
        self._wait()
        self.done += count
        return (time.perf_counter() - start) / count

    def _wait(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)


def in_turns(configs: Mapping[str, Config], folder: Path) -> dict[str, list[float]]:
    """Seconds per step of several configs, trained in alternation in one process: whatever slows the machine slows them all.

    The first quarter of the shortest schedule is not timed: kernels are compiled and memories fill.

    Args:
        configs: by name; they train on the same data.
        folder: of a run on that data.
    """
    trained = {name: Steps(config, folder) for name, config in configs.items()}
    length = min(config.optim.iterations for config in configs.values())
    warm_up = max(1, length // 4)
    turns = min(TURNS, length - warm_up)
    for each in trained.values():
        each.seconds(warm_up)
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    order = list(configs)
    for _ in range(turns):
        for name in order:
            seconds[name].append(trained[name].seconds((length - warm_up) // turns))
        order.reverse()  # so that none always comes second
    return seconds


def measure_step_times(config: Config, folder: Path) -> dict[str, list[float]]:
    """Seconds per step, turn by turn, of the run's config and of the same config with a plain queue."""
    times = in_turns({"queue": override(config, PLAIN_QUEUE), "ours": config}, folder)
    return {name: [digits(seconds) for seconds in each] for name, each in times.items()}


# ------------------------------------------------------------------ drawing


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


BEYOND = "beyond the paper"


def _noise_experiment(name: str, part: str, share: float) -> Experiment:
    title, arms = f"{part} of the training labels wrong", partial(noise_arms, share=share)
    return Experiment(name, title, BEYOND, ("cars", "glyphs"), arms, draw_recipes)


EXPERIMENTS = (
    Experiment("robustness", "Every recipe, and no memory", BEYOND, SETTINGS, recipe_arms, draw_recipes),
    _noise_experiment("robustness-noise", "A tenth", NOISE["data.noise"]),
    _noise_experiment("robustness-noise-20", "A fifth", 0.2),
    _noise_experiment("robustness-noise-30", "Three tenths", 0.3),
    Experiment("robustness-before", "What auto was before", BEYOND, ("cars",), earlier_arms, draw_earlier, elsewhere=False),
    Experiment("robustness-choice", "What auto was chosen from", BEYOND, SETTINGS, candidate_arms, draw_candidates),
    Experiment("robustness-cost", "What auto costs", BEYOND, ("cars", "omniglot"), cost_arms, draw_cost),
)  # fmt: skip
