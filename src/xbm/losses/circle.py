"""The circle loss (Sun et al. 2020)."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms, masked_lse, softplus
from xbm.losses.pair import PairLoss


class CircleLoss(PairLoss):
    """Weights each pair by its distance from where it should be (Sun et al. 2020).

    L_i = log(1 + Σ_N e^{γ a_n (S − m)} · Σ_P e^{−γ a_p (S − 1 + m)}),  a_n = [S + m]₊, a_p = [1 + m − S]₊, both detached.

    Weights: γ·a times the side's softmax times σ of the bracket's logarithm. All reductions are the same; an anchor
    without positives or without negatives adds nothing.

    Args:
        margin: m.
        gamma: γ, the scale.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = CircleLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        29.6427
    """

    name = "circle"
    kernel = "circle"
    one_reduction = True
    ignores_extremes = True
    hyperparameters: ClassVar = {"margin": float, "gamma": float}

    def __init__(
        self,
        margin: float = 0.25,
        gamma: float = 80.0,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.margin, self.gamma = margin, gamma

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        push = (S.detach() + self.margin).clamp(min=0)
        pull = (1 + self.margin - S.detach()).clamp(min=0)
        negatives = masked_lse(self.gamma * push * (S - self.margin), negative)
        positives = masked_lse(-self.gamma * pull * (S - 1 + self.margin), positive)
        return torch.where(positive.any(1) & negative.any(1), softplus(negatives + positives), 0)

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        slope = self.gamma * (s + self.margin).clamp(min=0)
        return Terms(logit=slope * (s - self.margin), slope=slope)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        slope = self.gamma * (1 + self.margin - s).clamp(min=0)
        return Terms(logit=-slope * (s - 1 + self.margin), slope=slope)

    def combine(self, p: Side, n: Side) -> Combined:
        total = p.lse + n.lse  # -inf if a side is empty
        share = torch.sigmoid(total)
        return Combined(softplus(total), positive_lse=share, negative_lse=share, active=total > -torch.inf)
