"""The supervised contrastive loss (Khosla et al. 2020), the form with the sum outside the logarithm."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms
from xbm.losses.pair import PairLoss, masked_lse


class SupConLoss(PairLoss):
    """L_i = log Σ_{a∈P∪N} e^{S_ia/τ} − 1/|P| Σ_{k∈P} S_ik/τ; 0 for an anchor without positives.

    Weights: π_ij/τ for a negative, (1/|P| − π_ik)/τ for a positive, π the softmax over all of an anchor's pairs. This is
    the one loss here whose weights can fall below 0: a positive that already holds more than its 1/|P| of the softmax is
    pushed away. All reductions are the same.

    Args:
        temperature: τ.
    """

    name = "sup_con"
    one_reduction = True
    ignores_extremes = True
    hyperparameters: ClassVar = {"temperature": float}

    def __init__(
        self,
        temperature: float = 0.1,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.temperature = temperature

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        logits = S / self.temperature
        mean = (logits * positive).sum(1) / positive.sum(1).clamp(min=1)
        return torch.where(positive.any(1), masked_lse(logits, positive | negative) - mean, 0)

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(logit=s / self.temperature, slope=1 / self.temperature)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        logit = s / self.temperature
        return Terms(value=logit, weight=1 / self.temperature, logit=logit, slope=1 / self.temperature)

    def combine(self, p: Side, n: Side) -> Combined:
        active = p.count > 0
        share = p.share
        everything = torch.logaddexp(p.lse, n.lse)
        return Combined(
            torch.where(active, everything - share * p.value, 0),
            positive_sum=share,
            positive_lse=torch.where(active, -(p.lse - everything).exp(), 0),
            negative_lse=torch.where(active, (n.lse - everything).exp(), 0),
            active=active,
        )
