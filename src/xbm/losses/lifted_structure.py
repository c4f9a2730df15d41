"""The lifted structure loss (Oh Song et al. 2016) in its smooth, per-anchor form."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms, masked_lse
from xbm.losses.pair import PairLoss


class LiftedStructureLoss(PairLoss):
    """Compares an anchor's farthest positives with its nearest negatives, by smooth maxima (Oh Song et al. 2016).

    L_i = [log Σ_P e^{λ−S} + log Σ_N e^{S−λ}]₊; 0 for an anchor without positives or without negatives.

    Weights: each side's softmax where the bracket is positive. All reductions are the same.

    Args:
        base: λ. It cancels within the bracket and is kept for the formula's sake.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = LiftedStructureLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        0.0533
    """

    name = "lifted_structure"
    kernel = "lifted_structure"
    one_reduction = True
    ignores_extremes = True
    hyperparameters: ClassVar = {"base": float}

    def __init__(
        self,
        base: float = 0.5,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.base = base

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        both = positive.any(1) & negative.any(1)
        total = masked_lse(self.base - S, positive) + masked_lse(S - self.base, negative)
        return torch.where(both, total, 0).clamp(min=0)

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(logit=s - self.base, slope=1.0)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        return Terms(logit=self.base - s, slope=1.0)

    def combine(self, p: Side, n: Side) -> Combined:
        total = p.lse + n.lse  # -inf if a side is empty
        active = total > 0
        one = active.to(total.dtype)
        return Combined(torch.where(active, total, 0), positive_lse=one, negative_lse=one, active=active)
