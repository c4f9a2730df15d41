"""The interface between losses and engines: terms and sides."""

import torch

from xbm.engine.streaming import Sums
from xbm.engine.terms import Terms


def test_picked_terms_keep_plain_numbers():
    t = Terms(value=torch.tensor([1.0, 2.0, 3.0]), weight=0.5, slope=torch.tensor([7.0, 8.0, 9.0]))
    some = t.pick(torch.tensor([True, False, True]))
    assert some.value.tolist() == [1.0, 3.0] and some.weight == 0.5 and some.slope.tolist() == [7.0, 9.0]
    assert some.logit is None and some.valid is None


def test_share_is_one_over_the_count_and_one_without_pairs():
    side = Sums(torch.zeros(3, 1)).side
    side.count = torch.tensor([0, 1, 4])
    assert side.share.tolist() == [1.0, 1.0, 0.25]
