"""The balanced contrastive loss with its constant as a variable: what happens if the push may outweigh the pull, or may not
even reach it. For study only; `ContrastiveLoss(reduction="balanced")` is this at 1."""

from typing import ClassVar

from torch import Tensor

from xbm.engine.terms import Combined, Side, balance
from xbm.losses import ContrastiveLoss

PUSHED = "contrastive_pushed"


class PushedContrastiveLoss(ContrastiveLoss):
    """L_i = Σ_P (1 − S) + c Σ_N [S − λ]₊ with c ≤ 1 so that the valid negatives weigh at most ρ times the positives.

    That is its reduction "balanced"; the others are as ever.

    Args:
        push: ρ.
    """

    name = PUSHED
    hyperparameters: ClassVar[tuple[str, ...]] = ("margin", "push")

    def __init__(self, margin: float = 0.5, push: float = 1.0, **shared: str) -> None:
        super().__init__(margin, **shared)
        self.push = push

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        if self.reduction != "balanced":
            return super().dense(S, positive, negative)
        valid = negative & (self.margin < S)
        share = self._share(positive.sum(1).to(S.dtype), valid.sum(1).to(S.dtype))
        return ((1 - S) * positive).sum(1) + share * ((S - self.margin) * valid).sum(1)

    def combine(self, p: Side, n: Side) -> Combined:
        if self.reduction != "balanced":
            return super().combine(p, n)
        share = self._share(p.weight, n.weight)
        return Combined(p.value + share * n.value, positive_sum=1.0, negative_sum=share)

    def _share(self, pull: Tensor, push: Tensor) -> Tensor:
        return balance(self.push * pull.clamp(min=1), push)
