"""Plans the runs that are still missing: first those that choose learning rates, then those on the test classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paper.experiment import Arm, Experiment, Setting
from paper.record import Records, identity, key
from paper.study import Study
from xbm_app.train.config import Config

SEEDS = 3  # of an arm, unless it or the command line says otherwise
TIMED = {"cost", "beside_queue"}  # measures


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
