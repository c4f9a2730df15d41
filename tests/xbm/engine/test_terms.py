"""The language between losses and engines: terms, sides, statistics, and a loss as text."""

import math

import pytest
import torch

from tests.known import NAMES
from xbm.engine.terms import LOSSES, Side, Terms, from_spec, statistics

OTHER = {
    "circle": {"margin": 0.4, "gamma": 13.0},
    "contrastive": {"margin": 0.3},
    "lifted_structure": {"base": 0.2},
    "margin": {"boundary": 0.9, "margin": 0.1},
    "multi_similarity": {"alpha": 3.0, "beta": 7.0, "base": 0.4, "epsilon": 0.2, "mining": False},
    "n_pairs": {"temperature": 0.3},
    "sup_con": {"temperature": 0.3},
    "triplet": {"margin": 0.25},
}


def test_every_loss_is_known_by_name():
    import xbm.losses  # what enters them

    assert sorted(NAMES) == sorted(OTHER)
    assert all(LOSSES[name] in vars(xbm.losses).values() for name in NAMES)


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", OTHER)
def test_a_loss_survives_its_text_with_every_hyper_parameter(name, reduction):
    loss_fn = LOSSES[name](**OTHER[name], reduction=reduction)
    twin = from_spec(loss_fn.spec)
    assert type(twin) is type(loss_fn) and twin.reduction == reduction
    assert {key: getattr(twin, key) for key in loss_fn.hyperparameters} == OTHER[name], "every hyper-parameter is named"


def test_a_changed_hyper_parameter_changes_the_text():
    loss_fn = LOSSES["contrastive"]()
    loss_fn.margin = 0.25
    assert from_spec(loss_fn.spec).margin == 0.25


def test_picked_terms_keep_plain_numbers():
    t = Terms(value=torch.tensor([1.0, 2.0, 3.0]), weight=0.5, slope=torch.tensor([7.0, 8.0, 9.0]))
    some = t.pick(torch.tensor([True, False, True]))
    assert some.value.tolist() == [1.0, 3.0] and some.weight == 0.5 and some.slope.tolist() == [7.0, 9.0]
    assert some.logit is None and some.valid is None


def test_an_empty_side_has_no_extremes_and_its_tensors_are_its_own():
    side = Side.empty(3, torch.zeros(1, dtype=torch.float64))
    assert side.lowest.tolist() == [math.inf] * 3 and side.highest.tolist() == side.lse.tolist() == [-math.inf] * 3
    assert side.value.dtype == torch.float64 and not side.count.is_floating_point()
    side.value += 1
    side.highest += 1
    assert side.weight.tolist() == [0.0] * 3 and side.lse.tolist() == [-math.inf] * 3


def test_share_is_one_over_the_count_and_one_without_pairs():
    side = Side.empty(3, torch.zeros(1))
    side.count = torch.tensor([0, 1, 4])
    assert side.share.tolist() == [1.0, 1.0, 0.25]


def test_an_inactive_anchor_has_no_valid_pairs_but_keeps_its_extremes():
    p, n = Side.empty(2, torch.zeros(1)), Side.empty(2, torch.zeros(1))
    p.count, n.count = torch.tensor([3, 4]), torch.tensor([5, 6])
    p.lowest, p.highest, n.highest = torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]), torch.tensor([0.5, 0.6])
    positives, negatives, hardest, easiest_positive, hardest_positive = statistics(torch.tensor([True, False]), p, n)
    assert positives.tolist() == [3, 0] and negatives.tolist() == [5, 0]
    assert (hardest is n.highest, easiest_positive is p.highest, hardest_positive is p.lowest) == (True, True, True)
    assert statistics(None, p, n)[0].tolist() == [3, 4]
