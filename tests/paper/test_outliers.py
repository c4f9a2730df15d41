import math

import pytest
import torch

from paper.outliers import EDGES, compare_losses, weight_shares
from xbm.losses import ContrastiveLoss, MultiSimilarityLoss

S = torch.tensor([[0.9, 0.95, 0.6, 0.4], [0.8, 0.1, 0.2, 0.3]])
POSITIVE = torch.tensor([[True, False, False, False]] * 2)


def test_contrastive_weighs_valid_negatives_alike():
    """The first anchor has two negatives above 0.5, the second none."""
    found = weight_shares(ContrastiveLoss(), S, POSITIVE, ~POSITIVE)
    assert found["anchors"] == 1 and found["valid"] == 2 and found["effective"] == pytest.approx(2)
    assert found["hardest"] == pytest.approx(0.5) and found["very_hard"] == pytest.approx(0.5)
    assert found["very_hard_count"] == pytest.approx(0.5)
    bins = dict(zip(EDGES, found["bins"]))
    assert bins[0.9] + bins[0.95] == pytest.approx(0.5) and bins[0.55] + bins[0.6] == pytest.approx(0.5)
    assert sum(found["bins"]) == pytest.approx(1)


def test_multi_similarity_gives_the_hardest_nearly_all():
    found = weight_shares(MultiSimilarityLoss(mining=False), S[:1], POSITIVE[:1], ~POSITIVE[:1])
    weights = [math.exp(40 * (s - 0.5)) for s in (0.95, 0.6, 0.4)]
    shares = [w / sum(weights) for w in weights]
    assert found["hardest"] == pytest.approx(shares[0], rel=1e-4)
    assert found["effective"] == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-4)


def test_nobody_with_a_negative_is_said():
    none = torch.zeros_like(POSITIVE)
    assert weight_shares(ContrastiveLoss(), S, POSITIVE, none) == {"anchors": 0}


def test_losses_are_compared_on_the_same_pairs():
    found = compare_losses({"a": ContrastiveLoss(), "b": ContrastiveLoss(margin=0.7)}, S, POSITIVE, ~POSITIVE)
    assert (found["a"]["valid"], found["b"]["valid"]) == (2, 1)
