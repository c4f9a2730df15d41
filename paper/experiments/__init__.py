"""Every experiment and every measurement by name, and the pages that show them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paper.experiment import Experiment
from paper.experiments import drift, losses, negatives, robustness, s_table_3, sizes, updates
from paper.page import Document
from xbm.errors import unknown
from xbm_app.train.config import Config
from xbm_app.train.state import RunState

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for family in (losses, s_table_3, sizes, drift, negatives, updates)
    for experiment in family.EXPERIMENTS
}  # the paper's
BEYOND: dict[str, Experiment] = {experiment.name: experiment for experiment in robustness.EXPERIMENTS}  # ours
ALL = {**EXPERIMENTS, **BEYOND}

S_TABLE_3 = Document("s-table-3.md", {experiment.name: experiment for experiment in s_table_3.EXPERIMENTS})
RESULTS = Document("results.md", {name: each for name, each in EXPERIMENTS.items() if name not in S_TABLE_3.experiments})
ROBUSTNESS = Document("robustness.md", BEYOND)
DOCUMENTS = (RESULTS, S_TABLE_3, ROBUSTNESS)

# What an arm's `measures` name: values for its result file, beyond curves and scores.
MEASURES: dict[str, Callable[[RunState], Any]] = {
    "lemma": drift.measure_lemma,
    "outliers": negatives.measure_weights,
    "mined": negatives.measure_mined,
    "retrieved": negatives.measure_retrieved,
    "shares": negatives.measure_shares,
}
TIMINGS: dict[str, Callable[[Config, Path], Any]] = {  # these train by themselves
    "cost": sizes.measure_cost,
    "beside_queue": sizes.measure_step_times,
}


def experiment(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in ALL:
        raise unknown("experiment", name, [*ALL, "smoke"])
    return ALL[name]
