"""Every experiment and every measurement by name, and the two pages that show them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paper.experiment import Experiment
from paper.experiments import drift, losses, negatives, robustness, robustness_cause, sizes, tuning, updates
from paper.page import Document
from xbm.errors import unknown
from xbm_app.train.config import Config
from xbm_app.train.state import RunState

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for family in (losses, tuning, sizes, drift, negatives, updates)
    for experiment in family.EXPERIMENTS
}  # the paper's
BEYOND: dict[str, Experiment] = {
    experiment.name: experiment for family in (robustness_cause, robustness) for experiment in family.EXPERIMENTS
}  # ours
ALL = {**EXPERIMENTS, **BEYOND}

RESULTS = Document("results.md", EXPERIMENTS)
ROBUSTNESS = Document("robustness.md", BEYOND)

# What an arm's `measures` name: values for its result file, beyond curves and scores.
MEASURES: dict[str, Callable[[RunState], Any]] = {
    "lemma": drift.measure_lemma,
    "outliers": negatives.measure_weights,
    "mined": negatives.measure_mined,
    "retrieved": negatives.measure_retrieved,
    "shares": robustness_cause.measure_shares,
}
TIMINGS: dict[str, Callable[[Config, Path], Any]] = {  # these train by themselves
    "cost": sizes.measure_cost,
    "beside_queue": robustness.measure_step_times,
}


def experiment(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in ALL:
        raise unknown("experiment", name, [*ALL, "smoke"])
    return ALL[name]
