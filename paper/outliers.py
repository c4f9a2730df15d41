"""The supplementary's claim that multi-similarity weights extremely hard negatives, possible outliers, heavily: measured.

The weights w_ij (the paper's Eq. 1) of several losses are taken on the same similarities, so that they differ in nothing but
how they weigh.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xbm.losses import PairLoss

EDGES = tuple(round(0.05 * k, 2) for k in range(21))  # bins of similarity, 0 to 1
VERY_HARD = 0.8  # a negative as similar as that may be mislabelled: the supplementary's figure 3


def weight_shares(loss: PairLoss, S: Tensor, positive: Tensor, negative: Tensor) -> dict[str, object]:
    """How the weight of an anchor's valid negatives is shared out, averaged over the anchors that have any.

    Args:
        S: (m, M) similarities; `positive`, `negative`: (m, M) masks.

    Returns:
        hardest: share of the one hardest negative. very_hard: share of those above 0.8. very_hard_count: their share by count.
        effective: e^entropy of the shares, the number of negatives that count. valid: how many have a weight at all.
        bins: share of the weight by similarity, see EDGES.
    """
    weights = loss.weights(S, positive, negative).where(negative, torch.zeros((), dtype=S.dtype)).clamp(min=0)
    able = weights.sum(1) > 0
    w, s = weights[able].double(), S[able].double()
    if not len(w):
        return {"anchors": 0}
    valid = w > 0
    share = w / w.sum(1, keepdim=True)
    hardest = share.gather(1, s.masked_fill(~valid, -torch.inf).argmax(1, keepdim=True))[:, 0]
    very = valid & (s > VERY_HARD)
    entropy = -(share * share.clamp(min=1e-300).log()).sum(1)
    bins = torch.bucketize(s, torch.tensor(EDGES[1:-1], dtype=s.dtype))
    by_bin = torch.zeros(len(s), len(EDGES) - 1, dtype=s.dtype).scatter_add_(1, bins, share)
    return {
        "anchors": int(able.sum()),
        "hardest": float(hardest.mean()),
        "very_hard": float((share * very).sum(1).mean()),
        "very_hard_count": float((very.sum(1) / valid.sum(1)).mean()),
        "effective": float(entropy.exp().mean()),
        "valid": float(valid.sum(1).double().mean()),
        "bins": [round(float(x), 6) for x in by_bin.mean(0)],
    }


def compare_losses(losses: Mapping[str, PairLoss], S: Tensor, positive: Tensor, negative: Tensor) -> dict[str, object]:
    """`weight_shares` of each loss on the same pairs."""
    return {name: weight_shares(loss, S, positive, negative) for name, loss in losses.items()}
