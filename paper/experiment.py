"""What an experiment is: arms that are trained with several seeds, and how a table or a figure is drawn from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper.record import NAMED, Records
from xbm_app.train.config import Config, override
from xbm_app.train.presets import preset

if TYPE_CHECKING:
    from paper.blocks import Block
    from paper.study import Study

HOLDOUT = 0.2  # share of the training classes that learning rates are chosen on
CHOOSING_SEED = 0
SMALL = ("omniglot", "glyphs")  # little drawings: a small net from scratch
OFF = {"memory.ratio": 0.0}
QUEUE = {"memory.update": "queue"}

# One recipe for all comparisons: the loss of the batch and that against the memory, added with equal weight.
RECIPE = {"memory.batch_weight": 1.0, "log.every": 50, "log.checkpoint_every": 1000}
# Nothing to warm up on schedules of 1,400 and 2,000 iterations: the memory is there from the start, and empty.
SHORT = {"memory.update": "queue", "memory.momentum": None, "memory.start": 0, "memory.fill": False}
# Learning rates to choose from: as many for every method. Pretrained ResNet-50 wants smaller steps than the others.
GRIDS = {"resnet50_v1": (1e-5, 3e-5, 1e-4), "resnet50": (1e-5, 3e-5, 1e-4), "small": (3e-4, 1e-3, 3e-3)}
GRID = (3e-5, 1e-4, 3e-4)


@dataclass(frozen=True)
class Setting:
    """Where an experiment is run: a data set, a trunk, and the weights it starts from (a bare file name where they are one)."""

    data: str
    trunk: str
    weights: str
    mini: bool = False  # a few iterations of each run, to see that everything works

    @property
    def where(self) -> str:
        return f"{self.data}, {self.trunk}"

    @property
    def slug(self) -> str:
        """For the names of files."""
        weights = "" if self.weights in NAMED else f"_{Path(self.weights).stem}"
        return f"{self.data}_{self.trunk}{weights}".replace("/", "-")

    @property
    def label(self) -> str:
        start = {"imagenet": "ImageNet", "none": "from scratch"}.get(self.weights, self.weights)
        return f"{self.data}, {self.trunk} ({start})"


def setting_of(data: str, trunk: str | None = None, weights: str | None = None) -> Setting:
    """The setting with the paper's trunk, GoogLeNet, unless told otherwise; little drawings have one of their own."""
    if data in SMALL:
        return Setting(data, "small", "none")
    return Setting(data, trunk or "googlenet", weights or "imagenet")


@cache
def base(setting: Setting) -> Config:
    """The config that the arms of every experiment start from."""
    config = override(preset(setting.data, trunk=setting.trunk), {"model.weights": setting.weights, **RECIPE})
    return override(config, SHORT) if setting.data in ("cars", "cub") else config


def grid(setting: Setting) -> tuple[float, ...]:
    rates = GRIDS.get(setting.trunk, GRID)
    return rates[1:] if setting.mini else rates


def config_of(setting: Setting, settings: Mapping[str, Any]) -> Config:
    """The base config of a setting with an arm's changes."""
    config = override(base(setting), settings)
    if not setting.mini:
        return config
    little = {
        "data.resize": 16, "data.crop": 16, "optim.iterations": 24, "optim.decay_at": (20,), "memory.fill": False,
        "memory.start": min(8, config.memory.start), "batch.size": max(8, config.batch.size // 8), "log.every": 10,
        "log.checkpoint_every": 1000,
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
        label: what the row or point is called.
        settings: what it changes in the base config.
        choose: None takes the learning rate as the settings have it. Otherwise it is chosen on held-out training classes, with
            these settings on top: so arms that differ only in them share one choice.
        chosen_as: what the row of that choice is called, where not `label`.
        measures: what is measured beyond training and scores, see `measures.py`.
        seeds: how many, where not 3; fewer where fewer are asked for.
        among: a setting that is chosen in the same way instead of the learning rate, and its candidates.
        tune: chooses in another way, in stages that depend on each other's results.
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
        source: where it is in the paper.
        data: the data sets the paper has it for; those and others can be run.
        arms: for a setting.
        elsewhere: whether it says something about data sets that the paper does not have it for.
        draw: what the page shows of it for one data set, given its studies, one a trunk; none where nothing was run.
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
