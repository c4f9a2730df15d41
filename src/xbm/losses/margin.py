"""The margin loss of "Sampling Matters in Deep Embedding Learning" (Wu et al. 2017), with a fixed boundary β."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Expand, Side, Terms, balance
from xbm.losses.pair import PairLoss

NEAREST = 1e-4  # d is kept this far from 0, where √ has no derivative


class MarginLoss(PairLoss):
    """Separates positives from negatives at a fixed distance, with a margin on both sides (Wu et al. 2017).

    L_i = Σ_P [d − β + α]₊ + Σ_N [β + α − d]₊,  d = √(2 − 2S), kept away from 0.

    Weights: 1/d for valid pairs. `reduction="mean"` averages each side over the anchor's valid pairs; "balanced" is the sum
    with negatives that together weigh no more than the positives.

    Args:
        boundary: β, the distance that separates positives from negatives.
        margin: α, how far on its side of the boundary a pair must be.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = MarginLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        1.0818
    """

    name = "margin"
    kernel = "margin"
    ignores_extremes = True
    hyperparameters: ClassVar = {"boundary": float, "margin": float}

    def __init__(
        self,
        boundary: float = 1.2,
        margin: float = 0.2,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.boundary, self.margin = boundary, margin

    @staticmethod
    def distance(S: Tensor) -> Tensor:
        return (2 - 2 * S).clamp(min=NEAREST**2).sqrt()

    @staticmethod
    def steepness(s: Tensor) -> Tensor:
        """|∂d/∂S|: 1/d, and 0 where d is clamped."""
        square = 2 - 2 * s
        return torch.where(square > NEAREST**2, square.clamp(min=NEAREST**2).rsqrt(), 0)

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        d = self.distance(S)
        far, near = d - self.boundary + self.margin, self.boundary + self.margin - d
        far_valid, near_valid = positive & (far > 0), negative & (near > 0)
        attract, repel = (far * far_valid).sum(1), (near * near_valid).sum(1)
        if self.reduction == "mean":
            return attract / far_valid.sum(1).clamp(min=1) + repel / near_valid.sum(1).clamp(min=1)
        if self.reduction == "balanced":
            weight = self.steepness(S.detach())
            return attract + repel * balance((weight * far_valid).sum(1), (weight * near_valid).sum(1))
        return attract + repel

    def floor(self, p: Side) -> Tensor | float:
        return 1 - (self.boundary + self.margin) ** 2 / 2

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(value=self.boundary + self.margin - self.distance(s), weight=self.steepness(s))

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        value = self.distance(s) - self.boundary + self.margin
        return Terms(value=value, weight=self.steepness(s), valid=value > 0)
