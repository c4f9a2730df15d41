"""Running sums: the same whatever the order and form in which pairs arrive, and finite for huge logits."""

import math

import pytest
import torch

from xbm.engine.dense import pair_weights
from xbm.engine.streaming import Sums
from xbm.engine.terms import Terms

m, M, D = 5, 41, 7


@pytest.fixture
def pairs():
    """Terms of every pair, which of them are valid (none of anchor 2's), and the rows."""
    value, weight = torch.rand(M, m, dtype=torch.float64), torch.rand(M, m, dtype=torch.float64)
    logit, slope = 30 * torch.randn(M, m, dtype=torch.float64), torch.rand(M, m, dtype=torch.float64)
    slope[::5] = 0
    valid = torch.rand(M, m) < 0.4
    valid[:, 2] = False
    return Terms(value, weight, logit, slope), valid, torch.randn(M, D, dtype=torch.float64)


def rows_of(t, cut):
    """The terms of some rows, in memory of their own: a tile's terms are used up."""
    return Terms(*(x[cut].clone() if isinstance(x, torch.Tensor) else x for x in t))


def by_tiles(pairs, order):
    t, valid, rows = pairs
    sums = Sums(rows.new_zeros(m, D))
    for cut in order:
        sums.add_tile(rows_of(t, cut), valid[cut], rows[cut])
    return sums


def by_lists(pairs, order):
    t, valid, rows = pairs
    sums = Sums(rows.new_zeros(m, D))
    for cut in order:
        anchor, row = valid[cut].T.nonzero(as_tuple=True)
        sums.add_list(Terms(*(x[cut][row, anchor] if isinstance(x, torch.Tensor) else x for x in t)), anchor, row, rows[cut])
    return sums


def alternating(pairs, order):
    t, valid, rows = pairs
    sums = Sums(rows.new_zeros(m, D))
    for n, cut in enumerate(order):
        if n % 2:
            sums.add_tile(rows_of(t, cut), valid[cut], rows[cut])
        else:
            anchor, row = valid[cut].T.nonzero(as_tuple=True)
            some = Terms(*(x[cut][row, anchor] if isinstance(x, torch.Tensor) else x for x in t))
            sums.add_list(some, anchor, row, rows[cut])
    return sums


ORDERS = {
    "at once": [slice(0, M)],
    "forwards": [slice(i, i + 6) for i in range(0, M, 6)],
    "backwards": [slice(i, i + 6) for i in range(0, M, 6)][::-1],
    "row by row": [slice(i, i + 1) for i in range(M)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("feed", [by_tiles, by_lists, alternating])
@pytest.mark.parametrize("plain", [False, True], ids=["tensors", "plain numbers"])
def test_sums_are_what_plain_loops_add_up(pairs, feed, order, plain):
    t, valid, rows = pairs
    if plain:
        t = t._replace(weight=0.7, slope=3.0)
    of_sum, of_lse = torch.rand(m, dtype=torch.float64), torch.rand(m, dtype=torch.float64)
    sums = feed((t, valid, rows), ORDERS[order])
    side = sums.finish()
    gradient = sums.gradient(of_sum, of_lse)
    weights = pair_weights(t, valid, side.lse, of_sum, of_lse)
    for i in range(m):
        here = [j for j in range(M) if valid[j, i]]
        weight = {j: 0.7 if plain else float(t.weight[j, i]) for j in here}
        slope = {j: 3.0 if plain else float(t.slope[j, i]) for j in here}
        assert side.count[i] == sum(s > 0 for s in slope.values())
        assert side.value[i].item() == pytest.approx(math.fsum(float(t.value[j, i]) for j in here))
        assert side.weight[i].item() == pytest.approx(math.fsum(weight.values()))
        mass = {j: math.exp(float(t.logit[j, i])) for j in here}
        total = math.fsum(mass.values())
        assert side.lse[i].item() == (pytest.approx(math.log(total)) if here else -math.inf)
        w = {j: float(of_sum[i]) * weight[j] + float(of_lse[i]) * mass[j] / total * slope[j] for j in here}
        assert weights[:, i].tolist() == pytest.approx([w.get(j, 0.0) for j in range(M)], abs=1e-12)
        expected = [math.fsum(w[j] * float(rows[j, d]) for j in here) for d in range(D)]
        assert gradient[i].tolist() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("feed", [by_tiles, by_lists])
@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("order", ORDERS)
def test_huge_logits_stay_finite_and_only_shift_the_result(pairs, feed, order, shift):
    t, valid, rows = pairs
    plain = feed((t, valid, rows), ORDERS[order])
    far = feed((t._replace(logit=t.logit + shift), valid, rows), ORDERS[order])
    expected, got = plain.finish(), far.finish()
    assert torch.allclose(got.lse, expected.lse + shift, rtol=0, atol=1e-9)
    assert torch.isfinite(got.lse[[0, 1, 3, 4]]).all()
    assert torch.allclose(far.gradient(0.0, 1.0), plain.gradient(0.0, 1.0), atol=1e-9)


def test_a_peak_that_rises_tile_by_tile_rescales_what_was_added_before():
    rows = torch.eye(3, dtype=torch.float64)
    sums = Sums(rows[:1])
    for j, logit in enumerate([0.0, 700.0, 701.0]):  # e^700 is near the end of float64
        sums.add_tile(
            Terms(logit=torch.tensor([[logit]]).double(), slope=1.0), torch.ones(1, 1, dtype=torch.bool), rows[j : j + 1]
        )
    assert sums.finish().lse.item() == pytest.approx(701 + math.log(1 + math.exp(-1)))
    assert sums.gradient(0.0, 1.0)[0].tolist() == pytest.approx([0.0, 1 / (1 + math.e), math.e / (1 + math.e)])


def test_nothing_added_is_an_empty_side_without_gradient():
    sums = Sums(torch.zeros(m, D, dtype=torch.float64))
    assert sums.finish().lse.tolist() == [-math.inf] * m and sums.gradient(1.0, 1.0) == 0.0


def test_an_empty_side_has_no_extremes_and_its_tensors_are_its_own():
    side = Sums(torch.zeros(3, D, dtype=torch.float64)).side
    assert side.lowest.tolist() == [math.inf] * 3 and side.highest.tolist() == side.lse.tolist() == [-math.inf] * 3
    assert side.value.dtype == torch.float64 and not side.count.is_floating_point()
    side.value += 1
    side.highest += 1
    assert side.weight.tolist() == [0.0] * 3
