"""The triplet loss over all of an anchor's triplets, without a list of them."""

from typing import ClassVar

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Expand, Side, Terms
from xbm.losses.pair import PairLoss

FEW = 16  # positives an anchor: up to here comparing with each in turn beats a binary search


class TripletLoss(PairLoss):
    """Makes every positive more similar than every negative, by a margin.

    L_i = Σ_{k∈P, j∈N} [S_ij − S_ik + η]₊.

    Weights: |P_ij| for a negative, the number of positives with S_ik < S_ij + η; for a positive the number of negatives with
    S_ij > S_ik − η. With an anchor's positives in ascending order a negative's weight c is a rank: it beats the first c.
    `reduction="mean"` averages over the anchor's valid triplets. A triplet pulls as it pushes, so "balanced" is the sum.

    Args:
        margin: η.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])  # unit rows: the first two are of one class
        >>> loss = TripletLoss()(v, torch.tensor([0, 0, 1]))
        >>> round(loss.item(), 4)
        0.0867
    """

    name = "triplet"
    kernel = "triplet"
    hyperparameters: ClassVar = {"margin": float}
    ranks_positives = True

    def __init__(
        self,
        margin: float = 0.1,
        *,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.margin = margin

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        anchors = []
        for s, p, n in zip(S, positive, negative):  # an anchor at a time: m·|P|·|N| triplets at once would not fit
            triplets = s[n][None, :] - s[p][:, None] + self.margin
            valid = triplets > 0
            total = (triplets * valid).sum()
            anchors.append(total / valid.sum().clamp(min=1) if self.reduction == "mean" else total)
        return torch.stack(anchors)

    def floor(self, p: Side) -> Tensor | float:
        return p.lowest - self.margin

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        """Counted from the lowest positive r: c·(S − r + η), less Σ beaten·(S_ik − r) in `combine`, adds up the triplets."""
        ranked = p.ranked  # (P, m)
        assert ranked is not None
        tile = s.dim() == 2
        if len(ranked) <= FEW:
            rank, lost = torch.zeros_like(s, dtype=torch.int8), []
            for similarity in ranked:
                beats = s > expand(similarity - self.margin)
                rank += beats
                if tile:
                    lost.append(beats.sum(0))
            beaten = torch.stack(lost) if lost else None
        else:
            thresholds, beaten = (ranked - self.margin).T.contiguous(), None  # searchsorted wants the anchor first, (m, P)
            if tile:
                rank = torch.searchsorted(thresholds, s.T.contiguous()).T
            else:
                rank = _segmented_rank(thresholds, s, expand(torch.arange(ranked.shape[1], device=s.device)))
        weight = rank.to(s.dtype)
        value = (s + expand(self.margin - self._reference(p))).mul_(weight)
        return Terms(value, weight, beaten=self.beaten(rank, p, expand) if beaten is None else beaten)

    @staticmethod
    def _reference(p: Side) -> Tensor:
        return p.lowest.where(p.lowest < torch.inf, 0)

    def beaten(self, rank: Tensor, p: Side, expand: Expand) -> Tensor:
        """(P, m): how many of the negatives at hand each ranked positive loses against; one of rank c beats the first c."""
        assert p.ranked is not None
        most, m = p.ranked.shape
        anchor = expand(torch.arange(m, device=rank.device)).expand(rank.shape)
        bins = (anchor * (most + 1) + rank.long()).flatten()
        histogram = torch.zeros(m * (most + 1), dtype=torch.int64, device=rank.device)
        histogram.index_add_(0, bins, torch.ones_like(bins))
        return histogram.view(m, most + 1).flip(1).cumsum(1).flip(1)[:, 1:].T

    def combine(self, p: Side, n: Side) -> Combined:
        loss = n.value
        if p.ranked is not None and p.beaten is not None:
            above = (p.ranked - self._reference(p)).where(p.ranked < torch.inf, 0)
            loss = loss - (p.beaten * above).sum(0)
        if self.reduction != "mean":
            return Combined(loss, positive_sum=1.0, negative_sum=1.0)
        share = 1 / n.weight.clamp(min=1)  # the sum of the ranks is the number of valid triplets
        return Combined(share * loss, positive_sum=share, negative_sum=share)


def _segmented_rank(thresholds: Tensor, s: Tensor, anchor: Tensor) -> Tensor:
    """For each pair, how many of its anchor's thresholds (ascending along the row) lie below s: a binary search by hand."""
    low = torch.zeros_like(anchor)
    high = torch.full_like(anchor, thresholds.shape[1])
    for _ in range(thresholds.shape[1].bit_length()):
        middle = (low + high) // 2
        above = thresholds[anchor, middle.clamp(max=thresholds.shape[1] - 1)] < s
        open_ = low < high
        low, high = torch.where(open_ & above, middle + 1, low), torch.where(open_ & ~above, middle, high)
    return low
