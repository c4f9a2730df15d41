"""Every experiment by name."""

from paper import cause, cost, drifts, losses, negatives, recipes, sizes, tuning, updates
from paper.experiment import Experiment
from xbm.errors import unknown

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for family in (losses, tuning, sizes, drifts, negatives, cost, updates)
    for experiment in family.EXPERIMENTS
}  # the paper's
BEYOND: dict[str, Experiment] = {each.name: each for family in (cause, recipes) for each in family.EXPERIMENTS}  # ours
ALL = {**EXPERIMENTS, **BEYOND}


def experiment(name: str) -> Experiment:
    if name not in ALL:
        raise unknown("experiment", name, [*ALL, "smoke"])
    return ALL[name]
