"""What an experiment is: arms that are trained with several seeds, and a function that draws a table or a figure from them.

The arms that several experiments share are defined here too, once each, so that their runs are shared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper.record import NAMED, Records
from xbm_app.train.config import Config, override
from xbm_app.train.presets import FULL_QUEUE, SLOTS, preset

if TYPE_CHECKING:
    from paper.page import Block
    from paper.study import Study

HOLDOUT = 0.2  # share of the training classes that learning rates are chosen on
CHOOSING_SEED = 0
SMALL = ("omniglot", "glyphs")  # drawings: a small network trained from scratch
OFF = {"memory.ratio": 0.0}
QUEUE = {"memory.update": "queue"}

# One recipe for all comparisons: the sum of the batch loss and the memory loss.
RECIPE = {"memory.batch_weight": 1.0, "log.every": 50, "log.checkpoint_every": 1000}
# Schedules of 1,400 and 2,000 iterations have no warm-up: the memory is used from the start, and starts empty.
SHORT = {"memory.update": "queue", "memory.momentum": None, "memory.start": 0, "memory.fill": False}
# Candidate learning rates, equally many for every method. A pretrained ResNet-50 needs smaller ones.
GRIDS = {"resnet50_v1": (1e-5, 3e-5, 1e-4), "resnet50": (1e-5, 3e-5, 1e-4), "small": (3e-4, 1e-3, 3e-3)}
GRID = (3e-5, 1e-4, 3e-4)
EXTENSIONS = 2  # rates added at most where the best lies at an edge of those that were tried


@dataclass(frozen=True)
class Setting:
    """Where an experiment is run: a data set, a trunk and its initial weights ("imagenet", "none" or a bare file name)."""

    data: str
    trunk: str
    weights: str
    mini: bool = False  # a few iterations per run, to test that everything works

    @property
    def where(self) -> str:
        return f"{self.data}, {self.trunk}"

    @property
    def slug(self) -> str:
        """Used in file names."""
        weights = "" if self.weights in NAMED else f"_{Path(self.weights).stem}"
        return f"{self.data}_{self.trunk}{weights}".replace("/", "-")

    @property
    def label(self) -> str:
        start = {"imagenet": "ImageNet", "none": "from scratch"}.get(self.weights, self.weights)
        return f"{self.data}, {self.trunk} ({start})"


GLYPHS = Setting("glyphs", "small", "none", mini=True)  # of `python -m paper run smoke`


def setting_of(data: str, trunk: str | None = None, weights: str | None = None) -> Setting:
    """A setting; the default trunk is the paper's, GoogLeNet. Drawings are always trained with a small network."""
    if data in SMALL:
        return Setting(data, "small", "none")
    return Setting(data, trunk or "googlenet", weights or "imagenet")


@cache
def base(setting: Setting) -> Config:
    """The config that the arms of every experiment change."""
    config = override(preset(setting.data, trunk=setting.trunk), {"model.weights": setting.weights, **RECIPE})
    return override(config, SHORT) if setting.data in ("cars", "cub") else config


@cache
def grid(setting: Setting) -> tuple[float, ...]:
    """The learning rates to choose from, in ascending order; Table 7's rate for the data set is one of them."""
    rates, paper = list(GRIDS.get(setting.trunk, GRID)), preset(setting.data).optim.lr
    while not min(rates) <= paper <= max(rates):
        further = next_rate(max(rates) if max(rates) < paper else min(rates), rates)
        assert further is not None
        rates = sorted([*rates, further])
    return tuple(rates[1:] if setting.mini else rates)


def next_rate(rate: float, rates: Sequence[float]) -> float | None:
    """The rate beyond the edge that `rate` lies at, if it does.

    Example:
        >>> next_rate(1e-3, [1e-4, 1e-3]), next_rate(1e-4, [1e-4, 1e-3]), next_rate(3e-4, [1e-4, 3e-4, 1e-3])
        (0.003, 3e-05, None)
    """
    digit, exponent = f"{rate:.0e}".split("e")
    if rate == max(rates):
        return float(f"3e{exponent}") if digit == "1" else float(f"1e{int(exponent) + 1}")
    if rate == min(rates):
        return float(f"1e{exponent}") if digit == "3" else float(f"3e{int(exponent) - 1}")
    return None


def config_of(setting: Setting, settings: Mapping[str, Any]) -> Config:
    """The base config of a setting with an arm's changes."""
    config = override(base(setting), settings)
    if not setting.mini:
        return config
    little = {
        "data.resize": 16, "data.crop": 16, "optim.iterations": 24, "optim.decay_at": (20,), "memory.fill": False,
        "memory.start": min(8, config.memory.start), "batch.size": max(8, config.batch.size // 8), "log.every": 10,
        "log.checkpoint_every": 1000, "log.evaluate_every": min(8, config.log.evaluate_every),
    }  # fmt: skip
    return override(config, little)


@dataclass(frozen=True)
class Progress:
    """How far a choice is: the runs that it needs as far as is known by now, and what was chosen once all are there."""

    runs: list[Config]
    choice: Any = None


@dataclass(frozen=True)
class Arm:
    """One way of training: a row of a table, a point of a figure.

    Attributes:
        label: name of the row or point.
        settings: changes to the base config.
        choose: None uses the learning rate of the settings. Otherwise the rate is chosen on held-out training classes with
            these further changes, so arms that differ only in them share one choice.
        chosen_as: label of that choice, if different from `label`.
        measures: what to measure on the finished run, see `MEASURES` in `paper/experiments`.
        seeds: number of seeds if not 3; fewer if fewer are requested.
        among: another setting that is chosen instead of the learning rate, and its candidates.
        tune: chooses in another way, in stages that depend on the results of earlier ones.
    """

    label: str
    settings: Mapping[str, Any]
    choose: Mapping[str, Any] | None = field(default_factory=dict)
    chosen_as: str = ""
    measures: tuple[str, ...] = ()
    seeds: int | None = None
    among: tuple[str, tuple[Any, ...]] | None = None
    tune: "Callable[[Setting, Arm, Records], Progress] | None" = None


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper.

    Attributes:
        source: its place in the paper.
        data: the data sets of the paper's table or figure.
        arms: the arms for a setting.
        draw: what the page shows for one data set, given one study per trunk.
        elsewhere: whether it is also meaningful for other data sets.
    """

    name: str
    title: str
    source: str
    data: tuple[str, ...]
    arms: Callable[[Setting], Sequence[Arm]]
    draw: "Callable[[str, Sequence[Study]], list[Block]]"
    elsewhere: bool = True

    def suits(self, setting: Setting) -> bool:
        return self.elsewhere or setting.mini or setting.data in self.data


# ------------------------------------------------------------------ arms that several experiments share

LOSSES = {"contrastive": "contrastive", "triplet": "triplet", "MS": "multi_similarity"}
SUMMED = {"loss.reduction": "sum"}
SCRATCH = {"model.weights": "none", "optim.iterations": 6000, "optim.decay_at": (4500,)}
# The usual way to use a memory: a queue of all images, its loss summed over pairs and added to the batch loss.
PLAIN_QUEUE = {**FULL_QUEUE, **SUMMED, "memory.reduction": None, "memory.batch_weight": 1.0}


def memory_of(setting: Setting) -> dict[str, Any]:
    """The memory of the paper's "w/ M" rows: Table 7 gives m = 0.9 for CUB and Cars, a queue for the others."""
    return SLOTS if setting.data in ("cub", "cars") else QUEUE


def loss_arms(setting: Setting) -> list[Arm]:
    """Each loss without and with memory. Small networks average over pairs, and have additional arms with the paper's sum."""
    losses = [(label, {"loss.name": name}) for label, name in LOSSES.items()]
    if setting.data in SMALL:
        losses.insert(1, ("contrastive, summed", {"loss.name": "contrastive", **SUMMED}))
    arms = []
    for label, loss in losses:
        measures = {"contrastive": ("retrieved", "outliers"), "MS": ("outliers",)}.get(label, ())
        arms.append(Arm(label, {**loss, **OFF}, measures=("retrieved",) if label == "contrastive" else ()))
        arms.append(Arm(f"{label} w/ M", {**loss, **memory_of(setting)}, measures=measures))
    return arms


def contrastive(setting: Setting) -> tuple[Arm, Arm]:
    """The contrastive loss without and with memory."""
    arms = {arm.label: arm for arm in loss_arms(setting)}
    return arms["contrastive"], arms["contrastive w/ M"]


def queue(setting: Setting) -> Arm:
    """The contrastive loss with a queue of the whole training set: used for drift, negatives and Lemma 1."""
    return Arm("contrastive, queue R_M = 1", {"loss.name": "contrastive", **FULL_QUEUE}, measures=("lemma", "mined"))


def sized(setting: Setting, loss: str, size: int, ratio: float, sampler: str = "pk", passes: bool = False) -> Arm:
    """A loss at some batch size and memory ratio. The learning rate is chosen at the usual batch size, with PK and R_M 0 or 1.

    Args:
        passes: keep the number of passes over the training images instead of the number of iterations.
    """
    optim, usual_size = base(setting).optim, base(setting).batch.size
    label = f"{loss}, batch {size}, {sampler}, R_M = {ratio:g}"
    settings = {"loss.name": LOSSES[loss], **QUEUE, "memory.ratio": ratio, "batch.size": size, "batch.sampler": sampler}
    usual: dict[str, Any] = {"batch.size": usual_size, "batch.sampler": "pk", "memory.ratio": 1.0 if ratio else 0.0}
    if passes:
        label += ", equal passes"
        factor = usual_size / size
        usual |= {"optim.iterations": optim.iterations, "optim.decay_at": optim.decay_at}
        decays = tuple(round(factor * step) for step in optim.decay_at)
        settings |= {"optim.iterations": round(factor * optim.iterations), "optim.decay_at": decays}
    chosen_as = f"{loss}, batch {usual_size}, pk, R_M = {1 if ratio else 0}"
    is_queue = (loss, size, ratio, sampler) == ("contrastive", usual_size, 1.0, "pk")
    tested = size in (16, usual_size, 256) and ratio in (0.0, 0.01, 1.0)  # the sentences of the paper; one seed between
    return Arm(label, settings, usual, chosen_as, queue(setting).measures if is_queue else (), seeds=None if tested else 1)
