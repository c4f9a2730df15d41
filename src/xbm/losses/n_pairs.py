"""The N-pairs loss (Sohn 2016), which with one positive is InfoNCE."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms, masked_lse, softplus
from xbm.losses.pair import PairLoss


class NPairsLoss(PairLoss):
    """Compares each positive with all negatives by cross-entropy (Sohn 2016).

    L_i = 1/|P| Σ_{k∈P} log(1 + Σ_{j∈N} e^{(S_ij − S_ik)/τ}).

    Weights: 1/τ times the mean over the positives of the negative's share; for a positive 1/(|P|τ) times what the
    negatives hold against it. All reductions are the same.

    Args:
        temperature: τ.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = NPairsLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        0.6369
    """

    name = "n_pairs"
    kernel = "n_pairs"
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
        against = masked_lse(S / self.temperature, negative)[:, None]
        each = softplus(torch.where(positive, against - S / self.temperature, -torch.inf))
        return each.sum(1) / positive.sum(1).clamp(min=1)

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(logit=s / self.temperature, slope=1 / self.temperature)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        against = expand(n.lse) - s / self.temperature
        return Terms(value=softplus(against), weight=torch.sigmoid(against) / self.temperature)

    def combine(self, p: Side, n: Side) -> Combined:
        share = p.share
        active = (p.count > 0) & (n.count > 0)
        return Combined(
            share * p.value,
            positive_sum=share,
            negative_lse=share * p.weight * self.temperature,
            active=active,
        )
