"""The contrastive loss, with the paper's weights: 1 for every positive, 1 for a negative above the margin."""

from typing import ClassVar

from torch import Tensor

from xbm.engine.terms import Expand, Side, Terms, balance
from xbm.losses.pair import PairLoss


class ContrastiveLoss(PairLoss):
    """Pulls positives together and pushes negatives apart that are more similar than a margin: the paper's main loss.

    L_i = Σ_P (1 − S) + Σ_N [S − λ]₊.

    `reduction="mean"` averages each side over the anchor's valid pairs. "balanced" is the sum as long as an anchor has no more
    valid negatives than positives; beyond that, its negatives share the weight of its positives.

    Args:
        margin: λ, the similarity below which a negative is ignored.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> import torch
        >>> v = torch.eye(3, 4)[[0, 0, 1]]
        >>> ContrastiveLoss()(v, torch.tensor([0, 1, 1])).item()  # two negatives at S = 1, two positives at S = 0
        1.0
    """

    name = "contrastive"
    kernel = "contrastive"
    ignores_extremes = True
    hyperparameters: ClassVar = {"margin": float}

    def __init__(
        self,
        margin: float = 0.5,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.margin = margin

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        valid = negative & (self.margin < S)
        attract = ((1 - S) * positive).sum(1)
        repel = ((S - self.margin) * valid).sum(1)
        if self.reduction == "mean":
            return attract / positive.sum(1).clamp(min=1) + repel / valid.sum(1).clamp(min=1)
        if self.reduction == "balanced":
            return attract + repel * balance(positive.sum(1).to(S.dtype), valid.sum(1).to(S.dtype))
        return attract + repel

    def floor(self, p: Side) -> Tensor | float:
        return self.margin

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(value=s - self.margin, weight=1.0)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        return Terms(value=1 - s, weight=1.0)
