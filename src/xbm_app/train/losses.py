"""The losses that a config can name: those of xbm, and `pml/NAME` for those of pytorch-metric-learning."""

import inspect
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from xbm.errors import InputError, unknown
from xbm.losses import LOSSES, MetricLearningLoss, PairLoss, PairStats
from xbm_app.extras import require
from xbm_app.train.config import Config

PML = "pml/"
THEIRS = "pytorch_metric_learning"
# bases without a formula, and losses that take no labels
NOT_OFFERED = {"BaseMetricLossFunction", "GenericPairLoss", "ManifoldLoss", "VICRegLoss"}


class UncountedLoss(nn.Module):
    """A loss of pytorch-metric-learning in a training run: it reports no valid pairs, so all statistics are 0."""

    def __init__(self, loss: MetricLearningLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, anchors: Tensor, labels: Tensor, memory: Any = None, *, ids: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, PairStats]:
        value = self.loss(anchors, labels, memory, ids=ids)
        if not return_stats:
            return value
        count, similarity = torch.zeros_like(labels), torch.zeros_like(value).detach().expand(len(labels))
        return value, PairStats(count, count, similarity, similarity, similarity, count.sum())


def is_theirs(name: str) -> bool:
    """Whether this is the name of a loss of pytorch-metric-learning."""
    return name.startswith(PML)


def check_name(name: str) -> None:
    """Raises InputError unless there is a loss of this name."""
    if is_theirs(name):
        _their_class(name)
    elif name not in LOSSES:
        raise unknown("loss", name, [*LOSSES, "pml/NAME"])


def takes_memory(name: str) -> bool:
    """Whether the loss of this name can be trained with a memory."""
    return not is_theirs(name) or MetricLearningLoss.takes_memory(_their_class(name))


def losses_of(config: Config, classes: int) -> tuple[PairLoss, PairLoss] | tuple[UncountedLoss, UncountedLoss]:
    """The loss within a batch, and the one against the memory: one object if it has parameters of its own.

    Args:
        classes: number of training classes.
    """
    if not is_theirs(config.loss.name):
        return pair_loss(config), pair_loss(config, config.reduction)
    loss = UncountedLoss(MetricLearningLoss(_build(config, classes), exclude=config.loss.exclude))
    if config.memory.ratio and not MetricLearningLoss.takes_memory(loss.loss.loss):
        only = "its own proxies" if any(True for _ in loss.parameters()) else "the batch"
        raise InputError(
            f"{config.loss.name} compares anchors only with {only}, so a memory has no effect: set memory.ratio=0, or pass "
            "--no-memory"
        )
    return loss, loss


def pair_loss(config: Config, reduction: str | None = None) -> PairLoss:
    """A loss of xbm, with the config's reduction or another one."""
    loss = config.loss
    check_name(loss.name)
    kind = LOSSES[loss.name]
    for name in loss.options:
        if name not in kind.hyperparameters:
            raise unknown(f"option of the {loss.name} loss", name, kind.hyperparameters)
    return kind(**loss.options, reduction=reduction or loss.reduction, exclude=loss.exclude)  # type: ignore[arg-type]


# ------------------------------------------------------------------ losses of pytorch-metric-learning


def _their_losses() -> ModuleType:
    require("metric-learning", THEIRS)
    from pytorch_metric_learning import losses

    return losses


def _their_class(name: str) -> type:
    losses = _their_losses()
    kinds = {
        PML + kind.__name__: kind
        for kind in vars(losses).values()
        if inspect.isclass(kind) and issubclass(kind, losses.BaseMetricLossFunction) and kind.__name__ not in NOT_OFFERED
    }
    if name not in kinds:
        raise unknown("loss", name, kinds)
    return kinds[name]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """The arguments of a loss class and of the classes that it passes further ones on to."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        own = base.__module__.startswith(f"{THEIRS}.losses.") and not base.__name__.endswith("Mixin")
        if own and base.__name__ not in NOT_OFFERED and "__init__" in vars(base):
            for each in inspect.signature(base).parameters.values():
                if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                    found.setdefault(each.name, each)
    return found


def _build(config: Config, classes: int) -> Any:
    """The loss, with the sizes that it needs taken from the data and the model."""
    name, options = config.loss.name, config.loss.options
    kind = _their_class(name)
    parameters = _parameters(kind)
    sizes = {"num_classes": classes, "embedding_size": config.model.dim, "descriptors_dim": config.model.dim}
    needed = [each for each, parameter in parameters.items() if parameter.default is parameter.empty]
    arguments: dict[str, Any] = {each: sizes[each] for each in needed if each in sizes}
    for option, value in options.items():
        if option not in parameters or option in arguments:
            raise unknown(f"option of the {name} loss", option, parameters.keys() - arguments.keys())
        arguments[option] = _suited(value, parameters[option].default, option)
    if missing := [each for each in needed if each not in arguments]:
        example = " ".join(f"--set loss.options.{each}=1" for each in missing)
        raise InputError(f"{name} needs values for {' and '.join(missing)}: set them, such as {example}")
    try:
        return kind(**arguments)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        raise InputError(f"{name} refuses loss.options={options}: {shorten(str(error), 200)}") from error


def _suited(value: float | bool | str, default: Any, option: str) -> float | bool | str:
    """A value of the kind that the default has: a config has no whole numbers, which a number of bins has to be."""
    if isinstance(default, bool) != isinstance(value, bool):
        raise InputError(f"{option} in loss.options must be {'true or false' if isinstance(default, bool) else 'a number'}")
    if isinstance(value, str) and isinstance(default, int | float):
        raise InputError(f"{option} in loss.options must be a number, got {value!r}")
    whole = isinstance(value, float) and value.is_integer() and not isinstance(default, float)
    return int(value) if whole else value
