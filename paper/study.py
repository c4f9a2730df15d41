"""An experiment in a setting, and its results: how learning rates are chosen, and which runs each arm has.

Plans the runs that are still missing: first those that choose learning rates, then those on the test classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from paper.experiment import CHOOSING_SEED, EXTENSIONS, HOLDOUT, Arm, Experiment, Setting, config_of, grid, next_rate
from paper.record import Record, Records, identity, key
from paper.statistics import Gain, paired_gain, welch_gain
from xbm_app.report.groups import summarize
from xbm_app.train.config import Config, flat, override

SEEDS = 3  # of an arm, unless it or the command line says otherwise
TIMED = {"cost", "beside_queue"}  # measures


@dataclass(frozen=True)
class Choice:
    """How a setting, usually the learning rate, was chosen."""

    tried: tuple[Any, ...]  # learning rates in ascending order, or candidates of another setting
    scores: tuple[float, ...]  # R@1 on the held-out classes
    setting: str = "optim.lr"

    @property
    def picked(self) -> Any:
        """The best candidate, the first one if there are several."""
        return self.tried[max(range(len(self.tried)), key=lambda k: (self.scores[k], -k))]

    @property
    def settings(self) -> dict[str, Any]:
        """What the run that is scored on the test classes changes."""
        return {self.setting: self.picked}

    @property
    def at_edge(self) -> bool:
        """Whether a value beyond the candidates might have been better."""
        return len(self.tried) > 1 and self.picked in (min(self.tried), max(self.tried))

    def to_dict(self) -> dict[str, Any]:
        """The choice and its budget, for the result file."""
        return {
            "setting": self.setting,
            "picked": self.picked,
            "tried": list(self.tried),
            "scores": list(self.scores),
            "by": f"recall@1 on {HOLDOUT:.0%} of the training classes, held out",
            "seed": CHOOSING_SEED,
            "runs": len(self.tried),
        }


@dataclass(frozen=True)
class Spread:
    """The scores of one arm, one per seed; empty if it has not run."""

    by_seed: dict[int, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return summarize(self.by_seed.values()).mean

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single seed."""
        return summarize(self.by_seed.values()).error

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds; NaN for a single seed."""
        return self.error * math.sqrt(len(self))

    @property
    def gain(self) -> Gain | None:
        """Of a spread of paired differences: their mean with its t test, or None if there are none."""
        return paired_gain(dict.fromkeys(self.by_seed, 0.0), self.by_seed)

    def over(self, other: "Spread") -> Gain | None:
        """How far this is above another one whose seeds are independent of it: Welch's test; None if either is empty."""
        return welch_gain(list(other.by_seed.values()), list(self.by_seed.values()))

    def __len__(self) -> int:
        return len(self.by_seed)


def paired(one: Spread, other: Spread) -> Spread:
    """The differences, other minus one, for the seeds that both have."""
    return Spread({seed: other.by_seed[seed] - one.by_seed[seed] for seed in one.by_seed if seed in other.by_seed})


@dataclass(frozen=True)
class Study:
    """One experiment in one setting."""

    experiment: Experiment
    setting: Setting
    records: Records

    @property
    def arms(self) -> list[Arm]:
        return list(self.experiment.arms(self.setting))

    def choosing(self, arm: Arm) -> list[Config]:
        """The runs that decide an arm's learning rate (or another setting); none if it is fixed."""
        if arm.choose is None:
            return []
        if arm.tune is not None:
            return arm.tune(self.setting, arm, self.records).runs
        held_out = {"data.holdout": HOLDOUT, "seed": CHOOSING_SEED}
        config = config_of(self.setting, {**arm.settings, **arm.choose, **held_out})
        setting, tried = self._among(arm)
        configs = {value: override(config, {setting: value}) for value in tried}
        added = 0 if arm.among or self.setting.mini else EXTENSIONS
        while added and (further := self._beyond(configs)) is not None:
            configs[further] = override(config, {setting: further})
            added -= 1
        return [configs[value] for value in sorted(configs)] if arm.among is None else list(configs.values())

    def _beyond(self, configs: Mapping[float, Config]) -> float | None:
        """The rate to try next: the best one lies at the edge of those tried, all of which have run."""
        records = {rate: self.records.find(identity(config)) for rate, config in configs.items()}
        scores = {rate: record.score() for rate, record in records.items() if record is not None}
        if len(scores) < len(configs):
            return None
        return next_rate(min(scores, key=lambda rate: (-scores[rate], rate)), [*scores])

    def _among(self, arm: Arm) -> tuple[str, tuple[Any, ...]]:
        return arm.among or ("optim.lr", grid(self.setting))

    def choice(self, arm: Arm) -> Choice | None:
        """What was chosen, or None while runs are missing or if there is nothing to choose.

        A rate beyond the edge of the grid that has not run yet is left out: the choice is then one at the edge.
        """
        if arm.tune is not None:
            return arm.tune(self.setting, arm, self.records).choice
        setting, usual = self._among(arm)
        tried = {flat(config)[setting]: self.records.find(identity(config)) for config in self.choosing(arm)}
        scores = {value: record.score() for value, record in tried.items() if record is not None}
        if not tried or any(value not in scores for value in usual):
            return None
        return Choice(tuple(scores), tuple(scores.values()), setting)

    def config(self, arm: Arm, seed: int) -> Config | None:
        """The config of the run that is scored on the test classes, or None until its learning rate is chosen."""
        config = config_of(self.setting, {**arm.settings, "seed": seed})
        if arm.choose is None:
            return config
        choice = self.choice(arm)
        return None if choice is None else override(config, choice.settings)

    def runs(self, arm: Arm) -> list[Record]:
        """The finished runs of an arm, by seed."""
        config = self.config(arm, 0)
        return [] if config is None else self.records.seeds(identity(config))

    def finished(self, arm: Arm) -> list[Record]:
        """The finished runs that did not diverge: only these have curves and measures."""
        return [record for record in self.runs(arm) if not record.values.get("failed")]

    def measurement(self, arm: Arm, name: str) -> Any:
        """A measurement on the first run of an arm that has it, or None."""
        return next((run.measures[name] for run in self.runs(arm) if run.measures.get(name)), None)

    def spread(self, arm: Arm, name: str = "recall@1", protocol: str | None = None) -> Spread:
        """The scores of an arm."""
        return Spread({record.seed: record.score(name, protocol) for record in self.runs(arm)})


# ------------------------------------------------------------------ the runs that are missing


@dataclass(frozen=True)
class Task:
    """One run to make.

    Attributes:
        chosen: how its learning rate was chosen, for the result file; None if it is fixed.
        measures: what to measure on the finished run.
    """

    config: Config
    chosen: dict[str, Any] | None = None
    measures: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        return key(identity(self.config))

    @property
    def alone(self) -> bool:
        """Whether no other run may use the machine at the same time."""
        return bool(TIMED & {*self.measures})


@dataclass(frozen=True)
class Plan:
    """Attributes:
    ready: runs that can start now, in this order.
    waiting: number of runs that wait for a learning rate.
    done: number of finished runs.
    """

    ready: list[Task]
    waiting: int
    done: int


def plan(experiments: Sequence[Experiment], settings: Sequence[Setting], seeds: int | None, records: Records) -> Plan:
    """What these experiments still need; a run that several need is planned once, with all that is to be measured on it.

    Args:
        seeds: of each run on the test classes: at most so many of an arm that has a number of its own. None: 3, or its own.
    """
    choosing: dict[str, Task] = {}
    scored: dict[str, Task] = {}
    done: set[str] = set()
    waiting = 0
    arms = [
        (study, arm)
        for experiment in experiments
        for study in (Study(experiment, setting, records) for setting in settings if experiment.suits(setting))
        for arm in study.arms
    ]
    chosen: list[tuple[Arm, Config, dict[str, Any] | None]] = []
    for study, arm in arms:
        tried = {key(identity(config)): Task(config) for config in study.choosing(arm)}
        missing = {each: task for each, task in tried.items() if records.get(each) is None}
        choosing |= missing
        done |= tried.keys() - missing.keys()
        config = None if missing else study.config(arm, 0)
        if config is None:
            waiting += _seeds(arm, seeds)
        else:
            choice = study.choice(arm)
            chosen.append((arm, config, None if choice is None else choice.to_dict()))
    most = max((_seeds(arm, seeds) for arm, _, _ in chosen), default=0)
    for seed in range(most):  # outermost: if time runs out, every arm has as many seeds as the others
        for arm, first, summary in chosen:
            if seed >= _seeds(arm, seeds):
                continue
            task = Task(replace(first, seed=seed), summary, arm.measures if seed == 0 else ())  # measured for one seed only
            record = records.get(task.key)
            if record is not None and (record.values.get("failed") or set(task.measures) <= set(record.measures)):
                done.add(task.key)
                continue
            where = choosing if task.key in choosing else scored  # a run on held-out classes may also choose a rate
            before = where.setdefault(task.key, task)
            both = dict.fromkeys((*before.measures, *task.measures))
            where[task.key] = replace(before, measures=tuple(both))
    return Plan([*choosing.values(), *scored.values()], waiting, len(done))


def _seeds(arm: Arm, most: int | None) -> int:
    return (arm.seeds or SEEDS) if most is None else min(most, arm.seeds or most)
