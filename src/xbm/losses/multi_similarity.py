"""The multi-similarity loss (Wang et al. 2019), with its pair mining."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms, masked_lse, softplus
from xbm.losses.pair import PairLoss


class MultiSimilarityLoss(PairLoss):
    """The multi-similarity loss (Wang et al. 2019): mines pairs and weights the hardest ones most.

    L_i = 1/α log(1 + Σ_P e^{−α(S−λ)}) + 1/β log(1 + Σ_N e^{β(S−λ)}).

    Mining keeps the negatives with S > min_P S − ε and the positives with S < max_N S + ε; an anchor left without
    positives or without negatives adds nothing. Without mining each side counts alone.
    Weights: e^{β(S−λ)} / (1 + Σ_N e^{β(S−λ)}) for a negative, the like for a positive. All reductions are the same.

    Args:
        alpha: α, how sharply positives are weighted.
        beta: β, how sharply negatives are weighted.
        base: λ, the similarity that separates the two sides.
        epsilon: ε of the mining.
        mining: off, every pair counts.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = MultiSimilarityLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        0.2262
    """

    name = "multi_similarity"
    kernel = "multi_similarity"
    one_reduction = True
    hyperparameters: ClassVar = {"alpha": float, "beta": float, "base": float, "epsilon": float, "mining": bool}

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        mining: bool = True,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.alpha, self.beta, self.base, self.epsilon, self.mining = alpha, beta, base, epsilon, mining

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        if self.mining:
            easiest = S.detach().masked_fill(~positive, torch.inf).amin(1, keepdim=True)
            hardest = S.detach().masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
            positive, negative = positive & (hardest + self.epsilon > S), negative & (easiest - self.epsilon < S)
        attract = softplus(masked_lse(-self.alpha * (S - self.base), positive)) / self.alpha
        repel = softplus(masked_lse(self.beta * (S - self.base), negative)) / self.beta
        if self.mining:
            return torch.where(positive.any(1) & negative.any(1), attract + repel, 0)
        return attract + repel

    def floor(self, p: Side) -> Tensor | float:
        return p.lowest - self.epsilon if self.mining else -torch.inf

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(logit=self.beta * (s - self.base), slope=self.beta)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        valid = s < expand(n.highest) + self.epsilon if self.mining else None
        return Terms(logit=-self.alpha * (s - self.base), slope=self.alpha, valid=valid)

    def combine(self, p: Side, n: Side) -> Combined:
        loss = softplus(p.lse) / self.alpha + softplus(n.lse) / self.beta
        active = (p.count > 0) & (n.count > 0) if self.mining else torch.ones_like(p.count, dtype=torch.bool)
        return Combined(
            torch.where(active, loss, 0),
            positive_lse=torch.where(active, torch.sigmoid(p.lse) / self.alpha, 0),
            negative_lse=torch.where(active, torch.sigmoid(n.lse) / self.beta, 0),
            active=active,
        )
