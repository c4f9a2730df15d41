"""The triplet loss over all of an anchor's triplets, without a list of them."""

import torch
from torch import Tensor

from xbm.engine.terms import Combined, Side, Spread, Terms
from xbm.losses.pair import PairLoss

FEW = 16  # positives an anchor: up to here comparing with each in turn beats a binary search


class TripletLoss(PairLoss):
    """L_i = Σ_{k∈P, j∈N} [S_ij − S_ik + η]₊.

    Weights: |P_ij| for a negative, the number of positives with S_ik < S_ij + η; for a positive the number of negatives with
    S_ij > S_ik − η. With an anchor's positives in ascending order a negative's weight c is a rank and its triplets add
    c·(S_ij + η) minus the sum of the first c positives. `reduction="mean"` averages over the anchor's valid triplets.

    Args:
        margin: η.
    """

    name = "triplet"
    hyperparameters = ("margin",)
    ranks_positives = True

    def __init__(self, margin: float = 0.1, **shared: str) -> None:
        super().__init__(**shared)
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

    def negative(self, s: Tensor, p: Side, spread: Spread) -> Terms:
        ranked = p.ranked  # (P, m)
        assert ranked is not None
        if len(ranked) <= FEW:
            rank, below = torch.zeros_like(s), torch.zeros_like(s)
            for similarity in ranked:
                beats = s > spread(similarity) - self.margin
                rank += beats
                below += torch.where(beats, spread(similarity), 0)
            return Terms(value=rank * (s + self.margin) - below, weight=rank)
        # searchsorted wants the anchor first; ranked − η keeps the comparison the one above, to the bit
        thresholds = (ranked - self.margin).T.contiguous()  # (m, P)
        sums = torch.cat([torch.zeros_like(ranked[:1]), ranked.where(ranked < torch.inf, 0).cumsum(0)])  # (P + 1, m)
        if s.dim() == 2:
            rank = torch.searchsorted(thresholds, s.T.contiguous()).T
            below = sums.gather(0, rank)
        else:
            anchor = spread(torch.arange(ranked.shape[1], device=s.device))
            rank = _segmented_rank(thresholds, s, anchor)
            below = sums[rank, anchor]
        return Terms(value=rank * (s + self.margin) - below, weight=rank.to(s.dtype))

    def beaten(self, s: Tensor, rank: Tensor, p: Side, spread: Spread) -> Tensor:
        """(P, m): how many of the negatives at hand (S, rank; rank 0 where not valid) each ranked positive loses against."""
        assert p.ranked is not None
        most, m = p.ranked.shape
        if s.dim() == 2 and most <= FEW:
            return torch.stack([(rank > k).sum(0) for k in range(most)])
        anchor = spread(torch.arange(m, device=s.device)).expand(s.shape)
        bins = (anchor * (most + 1) + rank.long()).flatten()
        histogram = torch.zeros(m * (most + 1), dtype=torch.int64, device=s.device)
        histogram.index_add_(0, bins, torch.ones_like(bins))
        # a negative of rank c beats the first c positives
        return histogram.view(m, most + 1).flip(1).cumsum(1).flip(1)[:, 1:].T

    def combine(self, p: Side, n: Side) -> Combined:
        if self.reduction == "sum":
            return Combined(n.value, positive_sum=1.0, negative_sum=1.0)
        share = 1 / n.weight.clamp(min=1)  # the sum of the ranks is the number of valid triplets
        return Combined(share * n.value, positive_sum=share, negative_sum=share)


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
