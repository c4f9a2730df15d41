"""The interface between losses and engines: what each pair contributes, and how an anchor's pairs combine.

Every loss has the form  L = 1/m Σ_i loss(P_i, N_i). An anchor's positives and negatives each enter through a sum of values,
a log-sum-exp of logits, or both. This is enough to compute value and gradient in one pass over the rows: the gradient of a
sum is Σ weight·v_j, that of a log-sum-exp is Σ e^{logit − lse}·slope·v_j, and their coefficients are known at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from xbm.errors import InputError

# Expands a per-anchor tensor to the pairs at hand: `x[anchor_of_pair]` for a list of pairs, `x` itself for a (T, m) tile.
Expand = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """What each pair of one side contributes, elementwise. Weights and slopes are absolute values of derivatives in S.

    A weight or slope that is the same for all pairs is a number, or a tensor without dimensions if it is learned.

    Example:
        >>> s = torch.tensor([0.2, 0.9])  # two negatives of a loss that adds S²
        >>> terms = Terms(value=s**2, weight=2 * s)
        >>> terms.pick(s > 0.5).weight.tolist()
        [1.7999999523162842]
    """

    value: Tensor | None = None  # enters the side's sum
    weight: Tensor | float = 0.0  # |∂value/∂S|
    logit: Tensor | None = None  # enters the side's log-sum-exp
    slope: Tensor | float = 0.0  # |∂logit/∂S|
    valid: Tensor | None = None  # pairs that count; None: all of the side
    beaten: Tensor | None = None  # (P, m), for a tile of a loss that ranks its positives: see `Side.beaten`

    def pick(self, which: Tensor) -> "Terms":
        """The terms of some pairs of a list."""
        parts: list[Any] = [x[which] if isinstance(x, Tensor) and x.dim() else x for x in self]
        return Terms(*parts)


@dataclass
class Side:
    """The positives or the negatives of each anchor, summed up. All (m,).

    Example:
        >>> count = torch.tensor([4, 0])  # a second anchor without any valid pair
        >>> none = torch.zeros(2)
        >>> Side(none, none, count, value=none, weight=none, lse=none).share.tolist()
        [0.25, 1.0]
    """

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
    """The loss of each anchor and the coefficients of its four gradient sums. All (m,) or plain numbers.

    Example:
        >>> pull, push = torch.tensor([0.5]), torch.tensor([0.25])
        >>> Combined(pull + push, positive_sum=1.0, negative_sum=1.0).loss.tolist()
        [0.75]
    """

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
    reference_gradient: Tensor | None = None  # (r, D), in the references
    easiest_positive: Tensor | None = None  # (m,), its similarity, -inf where there is none; None: not known


@dataclass
class PairStats:
    """Statistics of each anchor's pairs, as device tensors of shape (m,); also by name: `stats["valid_negatives"]`.

    Example:
        >>> from xbm import ContrastiveLoss
        >>> v, labels = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]]), torch.tensor([0, 0, 1])
        >>> loss, stats = ContrastiveLoss()(v, labels, return_stats=True)
        >>> stats.valid_negatives.tolist()  # how many negatives of each anchor have a gradient
        [1, 1, 2]
    """

    valid_positives: Tensor
    valid_negatives: Tensor
    hardest_negative: Tensor  # largest similarity among the negatives, -inf if there are none
    easiest_positive: Tensor  # largest similarity among the positives, -inf if there are none
    hardest_positive: Tensor  # smallest similarity among the positives, +inf if there are none
    unsound: Tensor  # (), anchors that were skipped

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)

    def read(self) -> dict[str, Tensor]:
        """Copies the statistics to the host.

        Raises:
            InputError: if an anchor was unsound on a device where the call could not raise; it contributed nothing.
        """
        if bad := int(self.unsound):
            raise InputError(
                f"{bad} anchors were skipped because they are not finite, are not of unit length, have a negative id, or "
                "(without ids) are not the rows enqueued last"
            )
        return {field.name: getattr(self, field.name).cpu() for field in fields(self) if field.name != "unsound"}


class Loss(Protocol):
    """What an engine needs to know about a loss; `xbm.losses.PairLoss` documents each part."""

    ranks_positives: ClassVar[bool]
    handle: int  # see `xbm.engine.new_handle`

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


# ------------------------------------------------------------------ arithmetic that several losses use


def balance(pull: Tensor, push: Tensor) -> Tensor:
    """(m,): the factor for an anchor's negatives with which their weights add up to at most its positives'.

    An anchor without positives counts as one with a single pair of weight 1, so its negatives still contribute.
    """
    return (pull.clamp(min=1) / push.clamp(min=1)).clamp(max=1)


def masked_lse(logits: Tensor, mask: Tensor) -> Tensor:
    """log Σ e^logit over the marked entries of each row, -inf (and no gradient) where there are none."""
    some = mask.any(1)
    return torch.where(some, logits.where(mask | ~some[:, None], -torch.inf).logsumexp(1), -torch.inf)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact everywhere: torch's own is linear from 20 on."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))
