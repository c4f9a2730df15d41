"""The language in which a loss describes itself to the engines: what a pair adds, and how an anchor's pairs combine.

Every loss here has the form  L = 1/m Σ_i loss(P_i, N_i), where an anchor's positives and negatives each enter through a
sum of values, a log-sum-exp of logits, or both. That is enough to make value and gradient in one pass over the bank:
the gradient of a sum is Σ weight·v_j, that of a log-sum-exp is Σ e^{logit − lse}·slope·v_j, and the coefficients with
which they enter are known per anchor at the end.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

# Spreads a per-anchor tensor over the pairs at hand: `x[anchor_of_pair]` for a list, `x` for a (T, m) tile.
Spread = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """What each pair of one side adds, elementwise. Weights and slopes are the sizes of the derivatives in S."""

    value: Tensor | None = None  # enters the side's sum
    weight: Tensor | float = 0.0  # |∂value/∂S|
    logit: Tensor | None = None  # enters the side's log-sum-exp
    slope: Tensor | float = 0.0  # |∂logit/∂S|
    valid: Tensor | None = None  # pairs that count; None: all of the side
    beaten: Tensor | None = None  # (P, m), for a tile of a loss that ranks its positives: see `Side.beaten`

    def pick(self, which: Tensor) -> "Terms":
        """The terms of some pairs of a list."""
        parts: list[Any] = [x[which] if isinstance(x, Tensor) else x for x in self]
        return Terms(*parts)


@dataclass
class Side:
    """An anchor's positives, or its negatives, summed up. All (m,)."""

    lowest: Tensor  # smallest similarity, +inf if none
    highest: Tensor  # largest similarity, -inf if none
    count: Tensor  # valid pairs
    value: Tensor  # Σ value
    weight: Tensor  # Σ weight
    lse: Tensor  # log Σ e^logit, -inf if none
    ranked: Tensor | None = None  # (P, m): similarities in ascending order, +inf beyond; triplet only
    beaten: Tensor | None = None  # (P, m): for each of those, the negatives it does not keep its margin from

    @property
    def share(self) -> Tensor:
        """1 / count: what a valid pair weighs in a mean."""
        return self.count.clamp(min=1).to(self.value.dtype).reciprocal()

    @staticmethod
    def empty(m: int, like: Tensor) -> "Side":
        whole = torch.zeros(m, dtype=torch.int64, device=like.device)
        zero = torch.zeros(m, dtype=like.dtype, device=like.device)
        inf = torch.full_like(zero, torch.inf)
        return Side(inf, -inf, whole, zero, zero.clone(), -inf)


class Combined(NamedTuple):
    """An anchor's loss and the coefficients of its four gradient sums. All (m,) or plain numbers."""

    loss: Tensor
    positive_sum: Tensor | float = 0.0  # times Σ_P weight·v
    positive_lse: Tensor | float = 0.0  # times Σ_P softmax·slope·v
    negative_sum: Tensor | float = 0.0
    negative_lse: Tensor | float = 0.0
    active: Tensor | None = None  # anchors whose pairs count at all; None: all


def balance(pull: Tensor, push: Tensor, most: float = 1.0) -> Tensor:
    """(m,): what to multiply an anchor's negatives by, so that their weights add up to at most `most` times its positives'.

    An anchor without positives counts as one with a single pair of weight 1: it may still be pushed.
    """
    return (most * pull.clamp(min=1) / push.clamp(min=1)).clamp(max=1)


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """A gradient times what came from above, which in float16 may be a loss scale that this type cannot hold."""
    if gradient.dtype == torch.float16:
        return (gradient.float() * upstream).to(gradient.dtype)
    return gradient * upstream


def two_sided(reduction: str, p: Side, n: Side, most: float = 1.0) -> Combined:
    """For losses that add what positives and negatives give: both summed, averaged, or the push bounded by the pull."""
    if reduction == "sum":
        return Combined(p.value + n.value, positive_sum=1.0, negative_sum=1.0)
    if reduction == "balanced":
        share = balance(p.weight, n.weight, most)
        return Combined(p.value + share * n.value, positive_sum=1.0, negative_sum=share)
    return Combined(p.share * p.value + n.share * n.value, positive_sum=p.share, negative_sum=n.share)


def statistics(active: Tensor | None, p: Side, n: Side) -> tuple[Tensor, ...]:
    """Valid positives and negatives, hardest negative, easiest and hardest positive of each anchor."""
    counts = (p.count, n.count) if active is None else (p.count * active, n.count * active)
    return (*counts, n.highest, p.highest, p.lowest)


class Loss(Protocol):
    """What an engine needs to know of a loss; `xbm.losses.PairLoss` says what each part means."""

    ranks_positives: ClassVar[bool]

    @property
    def spec(self) -> str: ...
    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor: ...
    def floor(self, p: Side) -> Tensor | float: ...
    def negative(self, s: Tensor, p: Side, spread: Spread) -> Terms: ...
    def positive(self, s: Tensor, n: Side, spread: Spread) -> Terms: ...
    def combine(self, p: Side, n: Side) -> Combined: ...


LOSSES: dict[str, Callable[..., Loss]] = {}  # by name; every subclass of PairLoss enters itself


@lru_cache(maxsize=64)
def from_spec(spec: str) -> Loss:
    """The loss that a text describes: how it travels through a graph node, which takes no objects."""
    values = json.loads(spec)
    return LOSSES[values.pop("loss")](**values)
