"""S-Table 3, tuned against tuned: every row chooses its learning rate and its length with the same budget, on held-out
training classes, before it meets the test classes.

The choice, the same for every row:

1. *Trial.* Every rate of the grid trains for 1,000 iterations on fold A (20 % of the training classes are held out, seed 0).
   If the best is the smallest or the largest rate, the next one (1e-k, 3e-k, ...) is tried too, at most twice.
2. *Full length.* The best three go on to 4,000 iterations: the same runs, resumed.
3. *Second fold.* The best two train for 4,000 iterations with fold B held out: other classes, disjoint from those of A.

All of it at a constant rate, scored every 500 iterations by MAP@R on the held-out classes. In steps 1 and 2 the score of a
rate is its best one. At the end the curves of the two folds are averaged, and the best point of the two mean curves gives the
rate and the length L (of equals the smaller rate and the shorter length). If that rate lies at the edge of what was tried and
fewer than two rates were added, the next one gets its trial, and steps 2 and 3 follow with the ranking as it then is.

The test run trains on all training classes: L iterations at the chosen rate and L / 4 more at a tenth of it. The decay is not
tuned.

What is not tuned is the same for all rows (Adam, weight decay 5e-4, batches of 64 with 4 images a class, 512-d, crops and
flips) or was fixed beforehand: the memory is that of the recipe `paper`, with the α and m of Table 7 (which the supplementary
gives for CUB and Cars: rows that average an image's views and descend), filled before the first iteration, and after that the
loss against the memory takes the place of the batch's, as in Algorithm 1. So the memory spends none of its budget on itself.

Beside it, letter against letter: rate, decay and length of Table 7. The paper gives them for the models with memory; that the
baselines had the same is our assumption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paper.experiment import (
    CHOOSING_SEED,
    EXTENSIONS,
    HOLDOUT,
    LOSSES,
    OFF,
    SUMMED,
    Arm,
    Progress,
    Setting,
    config_of,
    grid,
    next_rate,
)  # fmt: skip
from paper.record import Record, Records, identity
from xbm_app.train.config import Config, flat, override
from xbm_app.train.presets import preset

FOLDS = {"A": 0, "B": 1}
ORDER = ("contrastive", "MS", "triplet")
SEEDS = {"contrastive": 5, "MS": 5, "triplet": 3}
TUNED, LETTER = "tuned", "Table 7"
AFTER = 4  # a run goes on for this share (1/4) of its length at a tenth of its rate

Curve = dict[int, float]  # MAP@R on the held-out classes by iteration; empty for a run that diverged


@dataclass(frozen=True)
class Budget:
    """What an arm may spend on its choice."""

    rates: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)  # ascending
    trial: int = 1000  # iterations
    full: int = 4000  # iterations
    every: int = 500  # iterations between two scores
    going_on: int = 3  # rates that train to the full length
    finalists: int = 2  # rates that train again on fold B
    extensions: int = EXTENSIONS


def budget_of(setting: Setting) -> Budget:
    return Budget(grid(setting), 4, 8, 2, 2, 1, 1) if setting.mini else Budget()


@dataclass(frozen=True)
class TunedChoice:
    """A learning rate and a length, and what they were chosen by."""

    picked: float
    length: int
    score: float  # MAP@R, mean of both folds
    trials: dict[float, Curve]
    full: dict[float, Curve]
    again: dict[float, Curve]
    added: tuple[float, ...]  # rates beyond the grid
    budget: Budget
    setting: str = "optim.lr"

    @property
    def settings(self) -> dict[str, Any]:
        """What the test run changes: the rate, and the length with its decay."""
        after = max(1, self.length // AFTER)
        return {self.setting: self.picked, "optim.iterations": self.length + after, "optim.decay_at": (self.length,)}

    @property
    def tried(self) -> tuple[float, ...]:
        return tuple(sorted(self.trials))

    @property
    def scores(self) -> tuple[float, ...]:
        """MAP@R of the trials, in the order of the rates."""
        return tuple(best_of(self.trials[rate]) for rate in self.tried)

    @property
    def at_edge(self) -> bool:
        return self.picked in (self.tried[0], self.tried[-1])

    @property
    def longest(self) -> bool:
        """Whether more iterations than were tried might have been better."""
        return self.length == self.budget.full

    def to_dict(self) -> dict[str, Any]:
        """For the result file: the choice, all scores it rests on, and the budget that was spent on it."""
        budget = self.budget
        spent = budget.trial * len(self.trials) + (budget.full - budget.trial) * len(self.full) + budget.full * len(self.again)
        return {
            "setting": self.setting,
            "picked": self.picked,
            "length": self.length,
            "score": round(self.score, 6),
            "tried": list(self.tried),
            "scores": list(self.scores),
            "added": list(self.added),
            "at_edge": self.at_edge,
            "longest": self.longest,
            "curves": {
                stage: [{"rate": rate, "iteration": list(curve), "map@r": list(curve.values())} for rate, curve in runs.items()]
                for stage, runs in {"trial, fold A": self.trials, "fold A": self.full, "fold B": self.again}.items()
            },
            "by": f"map@r on {HOLDOUT:.0%} of the training classes, held out; the mean of two folds, every {budget.every}",
            "seed": CHOOSING_SEED,
            "runs": len(self.trials) + len(self.full) + len(self.again),
            "iterations": spent,
        }


def best_of(curve: Curve) -> float:
    return max(curve.values(), default=0.0)


def best_rates(curves: Mapping[float, Curve], count: int) -> list[float]:
    """The rates with the best scores, best first; of equals the smaller."""
    return sorted(curves, key=lambda rate: (-best_of(curves[rate]), rate))[:count]


def curve_of(record: Record, every: int) -> Curve:
    """The scores of a run on its held-out classes: those taken on the way, or the last one where none was."""
    if record.values.get("failed"):
        return {}
    steps, values = record.curve("map@r")
    curve = {int(step) + 1: value for step, value in zip(steps, values) if (int(step) + 1) % every == 0}
    return curve or {int(record.config["optim.iterations"]): record.score("map@r")}


def tune(setting: Setting, arm: Arm, records: Records) -> Progress:
    """The runs that the choice of an arm needs as far as is known by now, and the choice once all of them are there."""
    budget = budget_of(setting)
    runs: dict[tuple[int, int, float], Config] = {}
    rates, added = sorted(budget.rates), list[float]()

    def curves(fold: str, iterations: int, chosen: Sequence[float]) -> dict[float, Curve] | None:
        configs = {rate: choosing_config(setting, arm, rate, iterations, FOLDS[fold], budget.every) for rate in chosen}
        runs.update({(FOLDS[fold], iterations, rate): config for rate, config in configs.items()})
        finished = {rate: records.find(identity(config)) for rate, config in configs.items()}
        there = {rate: curve_of(record, budget.every) for rate, record in finished.items() if record is not None}
        return there if len(there) == len(finished) else None

    def extend(rate: float) -> bool:
        further = next_rate(rate, rates)
        if further is None or len(added) == budget.extensions:
            return False
        rates.append(further)
        rates.sort()
        added.append(further)
        return True

    while True:
        trials = curves("A", budget.trial, rates)
        if trials is None:
            break
        if extend(best_rates(trials, 1)[0]):
            continue
        full = curves("A", budget.full, best_rates(trials, budget.going_on))
        if full is None:
            break
        again = curves("B", budget.full, best_rates(full, budget.finalists))
        if again is None:
            break
        means = {rate: mean_curve(full[rate], again[rate]) for rate in again}
        picked = best_rates(means, 1)[0]
        if extend(picked):
            continue
        score = best_of(means[picked])
        length = min((t for t, value in means[picked].items() if value == score), default=budget.full)
        choice = TunedChoice(picked, length, score, trials, full, again, tuple(added), budget)
        return Progress(list(runs.values()), choice)
    return Progress(list(runs.values()))


def mean_curve(one: Curve, other: Curve) -> Curve:
    """Over the iterations that either has; a run that diverged counts as 0."""
    return {t: (one.get(t, 0.0) + other.get(t, 0.0)) / 2 for t in sorted({*one, *other})}


def choosing_config(setting: Setting, arm: Arm, rate: float, iterations: int, fold: int, every: int) -> Config:
    """A run at a constant rate, scored on held-out classes on the way."""
    constant = {
        "optim.lr": rate, "optim.iterations": iterations, "optim.decay_at": (), "data.holdout": HOLDOUT, "data.fold": fold,
        "seed": CHOOSING_SEED, "log.evaluate_every": every,
    }  # fmt: skip
    return override(config_of(setting, arm.settings), constant)


# ------------------------------------------------------------------ the rows of S-Table 3


def memory_to_the_letter(setting: Setting) -> dict[str, Any]:
    """The memory of the recipe `paper`: Table 7's, and its loss alone."""
    settings = flat(preset(setting.data, trunk=setting.trunk, recipe="paper"))
    memory = {name: value for name, value in settings.items() if name.startswith("memory.")}
    warm_up = {"memory.start": 1} if setting.mini else {}  # a miniature is shorter than any warm-up
    return {**memory, "memory.batch_weight": 0.0, **warm_up}


def schedule_to_the_letter(setting: Setting) -> dict[str, Any]:
    settings = flat(preset(setting.data, trunk=setting.trunk, recipe="paper"))
    return {name: settings[name] for name in ("optim.lr", "optim.iterations", "optim.decay_at")}


def label_of(loss: str, memory: bool, kind: str) -> str:
    return f"{loss}{' w/ M' if memory else ''}, {kind}"


def tuned_arm(setting: Setting, loss: str, memory: bool) -> Arm:
    kept = memory_to_the_letter(setting) if memory else OFF
    return Arm(label_of(loss, memory, TUNED), {"loss.name": LOSSES[loss], **SUMMED, **kept}, seeds=SEEDS[loss], tune=tune)


def letter_arm(setting: Setting, loss: str, memory: bool, seeds: int | None = None) -> Arm:
    """The recipe `paper`: Algorithm 1, and the rate and length of Table 7."""
    settings = {**tuned_arm(setting, loss, memory).settings, **schedule_to_the_letter(setting)}
    return Arm(label_of(loss, memory, LETTER), settings, choose=None, seeds=seeds)


def tuned_arms(setting: Setting) -> list[Arm]:
    """Each loss without and with memory, tuned; then the same with Table 7's schedule. A miniature has one loss."""
    rows = [(loss, memory) for loss in (ORDER[:1] if setting.mini else ORDER) for memory in (False, True)]
    return [
        *(tuned_arm(setting, loss, memory) for loss, memory in rows),
        *(letter_arm(setting, loss, memory, SEEDS[loss]) for loss, memory in rows),
    ]
