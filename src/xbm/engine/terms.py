"""The interface between losses and engines: what each pair contributes, and how an anchor's pairs combine.

Every loss has the form  L = 1/m Σ_i loss(P_i, N_i). An anchor's positives and negatives each enter through a sum of values,
a log-sum-exp of logits, or both. This is enough to compute value and gradient in one pass over the rows: the gradient of a
sum is Σ weight·v_j, that of a log-sum-exp is Σ e^{logit − lse}·slope·v_j, and their coefficients are known at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

# Expands a per-anchor tensor to the pairs at hand: `x[anchor_of_pair]` for a list of pairs, `x` itself for a (T, m) tile.
Expand = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """What each pair of one side contributes, elementwise. Weights and slopes are absolute values of derivatives in S."""

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
    """The positives or the negatives of each anchor, summed up. All (m,)."""

    lowest: Tensor  # smallest similarity, +inf if there is none
    highest: Tensor  # largest similarity, -inf if there is none
    count: Tensor  # number of valid pairs
    value: Tensor  # Σ value
    weight: Tensor  # Σ weight
    lse: Tensor  # log Σ e^logit, -inf if there is none
    ranked: Tensor | None = None  # (P, m): similarities in ascending order, padded with +inf; triplet only
    beaten: Tensor | None = None  # (P, m): how many negatives violate the margin of each ranked positive

    @property
    def share(self) -> Tensor:
        """1 / count: the weight of a valid pair in a mean."""
        return self.count.clamp(min=1).to(self.value.dtype).reciprocal()


class Combined(NamedTuple):
    """The loss of each anchor and the coefficients of its four gradient sums. All (m,) or plain numbers."""

    loss: Tensor
    positive_sum: Tensor | float = 0.0  # coefficient of Σ_P weight·v
    positive_lse: Tensor | float = 0.0  # coefficient of Σ_P softmax·slope·v
    negative_sum: Tensor | float = 0.0
    negative_lse: Tensor | float = 0.0
    active: Tensor | None = None  # anchors whose pairs count at all; None: all


class Result(NamedTuple):
    """What an engine returns for a batch of m anchors."""

    loss: Tensor  # (), the mean over the anchors
    gradient: Tensor  # (m, D), of the mean loss in the anchors
    row_gradient: Tensor | None  # (M, D), in the rows
    statistics: tuple[Tensor, ...]  # five of (m,): see `PairStats`; empty if not requested
    unsound: Tensor | None  # (), anchors that had to be skipped; None if they were checked before


class Loss(Protocol):
    """What an engine needs to know about a loss; `xbm.losses.PairLoss` documents each part."""

    ranks_positives: ClassVar[bool]
    handle: int  # see `graph_node.new_handle`

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor: ...
    def floor(self, p: Side) -> Tensor | float: ...
    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms: ...
    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms: ...
    def combine(self, p: Side, n: Side) -> Combined: ...


class Shards(Protocol):
    """How an engine reaches the other processes that hold parts of the same memory: what it needs of `Ranks`.

    All of them make the same calls in the same order, with tensors of the same shape, and get the same answer.
    """

    rank: int

    def maximum(self, x: Tensor, why: str) -> Tensor: ...
    def sum(self, x: Tensor, why: str) -> Tensor: ...
    def everyone(self, x: Tensor, why: str) -> list[Tensor]: ...
