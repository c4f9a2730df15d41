"""Every experiment by name."""

from xbm.errors import unknown
from xbm.study.paper import cost, drifts, losses, negatives, sizes, updates
from xbm.study.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for family in (losses, sizes, drifts, negatives, cost, updates)
    for experiment in family.EXPERIMENTS
}


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, [*EXPERIMENTS, "smoke"])
    return EXPERIMENTS[name]
