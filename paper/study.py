"""An experiment in a setting, and its results: how learning rates are chosen, and which runs each arm has."""

from dataclasses import dataclass, field
from typing import Any

from paper.experiment import CHOOSING_SEED, HOLDOUT, Arm, Experiment, Setting, config_of, grid
from paper.record import Record, Records, identity
from xbm_app.report.statistics import summarize
from xbm_app.train.config import Config, override


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
        return [override(config, {setting: value}) for value in tried]

    def _among(self, arm: Arm) -> tuple[str, tuple[Any, ...]]:
        return arm.among or ("optim.lr", grid(self.setting))

    def choice(self, arm: Arm) -> Choice | None:
        """What was chosen, or None while runs are missing or if there is nothing to choose."""
        if arm.tune is not None:
            return arm.tune(self.setting, arm, self.records).choice
        configs = self.choosing(arm)
        records = [record for config in configs if (record := self.records.find(identity(config)))]
        if not configs or len(records) < len(configs):
            return None
        setting, tried = self._among(arm)
        return Choice(tried, tuple(record.score() for record in records), setting)

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
