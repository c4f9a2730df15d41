"""What is still to run: learning rates are chosen first, then the test classes are met once with what was chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xbm.study.paper.experiment import Experiment, Setting
from xbm.study.paper.record import Records, identity, key
from xbm.study.paper.study import Study
from xbm.train.config import Config


@dataclass(frozen=True)
class Task:
    """One run to make.

    Attributes:
        chosen: how its learning rate was chosen, for the result file; None where it was given.
        measures: what to measure beyond training and scores.
    """

    config: Config
    chosen: dict[str, Any] | None = None
    measures: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return key(identity(self.config))

    @property
    def alone(self) -> bool:
        """Whether nothing else may use the machine meanwhile."""
        return "cost" in self.measures


@dataclass(frozen=True)
class Plan:
    """Attributes:
    ready: runs that can start now, in the order they should.
    waiting: how many more there will be once learning rates are chosen.
    done: how many are there already.
    """

    ready: list[Task]
    waiting: int
    done: int


def plan(experiments: Sequence[Experiment], settings: Sequence[Setting], seeds: int, records: Records) -> Plan:
    """What these experiments still need; a run that several need is planned once, with all that is to be measured on it."""
    choosing: dict[str, Task] = {}
    scored: dict[str, Task] = {}
    waiting = done = 0
    seen: set[str] = set()
    for seed in range(seeds):  # outermost: if time runs out, every arm has as many seeds as the others
        for experiment in experiments:
            for study in (Study(experiment, setting, records) for setting in settings if experiment.suits(setting)):
                for arm in study.arms:
                    if seed >= (arm.seeds or seeds):
                        continue
                    tasks = [Task(config) for config in study.choosing(arm)]
                    missing = [task for task in tasks if records.find(identity(task.config)) is None]
                    choosing |= {task.key: task for task in missing}
                    done += len({task.key for task in tasks} - {task.key for task in missing} - seen)
                    seen |= {task.key for task in tasks}
                    config = study.config(arm, seed)
                    if config is None:
                        waiting += 1
                        continue
                    choice = study.choice(arm)
                    measures = arm.measures if seed == 0 else ()  # one seed is enough to look at
                    task = Task(config, None if choice is None else choice.told(), measures)
                    found = records.find(identity(config))
                    if found is not None and (found.values.get("failed") or set(measures) <= set(found.measures)):
                        done += task.key not in seen
                    else:
                        before = scored.get(task.key)
                        both = dict.fromkeys((*(before.measures if before else ()), *measures))
                        scored[task.key] = Task(config, task.chosen, tuple(both))
                    seen.add(task.key)
    return Plan([*choosing.values(), *scored.values()], waiting, done)
