"""One pass over the bank: the same in every form, and memory that does not grow with the bank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pairs import pairing
from torch.profiler import ProfilerActivity, profile

from xbm.engine import reference, streaming
from xbm.engine.pairing import Pairing, count_related, list_related
from xbm.losses import LOSSES

NAMES = sorted(LOSSES)
FORMS = {
    "all at once": {},
    "all at once, anchors in turn": {"TILE": 6 * 9, "COLUMNS": 200},
    "one tile": {"SMALL": -1},
    "tiles of one row": {"SMALL": -1, "TILE": 1},
    "single rows": {"SMALL": -1, "TILE": 6 * 9, "SPARSE": 1.0},
    "whole tiles": {"SMALL": -1, "TILE": 6 * 9, "SPARSE": -1.0},
    "fixed shapes": {"SMALL": -1, "TILE": 6 * 9, "MOST_LISTED": -1},
    "fixed shapes, anchors in turn": {"SMALL": -1, "TILE": 6 * 9, "MOST_LISTED": -1, "COLUMNS": 200},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("self_by", ["id", "slot"])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_gives_value_and_both_gradients_of_autograd(name, self_by, form, monkeypatch):
    for constant, setting in FORMS[form].items():
        monkeypatch.setattr(streaming, constant, setting)
    loss_fn = LOSSES[name]()
    anchors, p = pairing(self_by=self_by)
    v, rows = anchors.clone().requires_grad_(), p.rows.clone().requires_grad_()
    value, stats = reference.compare(loss_fn, v, p._replace(rows=rows), True)
    (value * len(v)).backward()
    found = streaming.compare(loss_fn, anchors, p, row_gradient=True, stats=True)
    assert found.loss.sum().item() == pytest.approx(value.item() * len(v), rel=1e-11)
    assert torch.allclose(found.gradient, v.grad, atol=1e-10, rtol=0)
    assert torch.allclose(found.row_gradient, rows.grad, atol=1e-10, rtol=0)
    assert all(torch.allclose(a.double(), b.double()) for a, b in zip(found.statistics, stats))


def test_rows_get_a_gradient_only_if_asked():
    anchors, p = pairing()
    assert streaming.compare(LOSSES["contrastive"](), anchors, p, row_gradient=False, stats=False).row_gradient is None


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("small", [-1, streaming.SMALL])
def test_rows_are_widened_to_the_anchors_type(stored, small, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", small)
    anchors, p = pairing()
    narrow = p._replace(rows=p.rows.to(stored))
    wide = p._replace(rows=narrow.rows.double())
    for name in ("multi_similarity", "triplet"):
        a, b = (streaming.compare(LOSSES[name](), anchors, each, False, False) for each in (narrow, wide))
        assert a.gradient.dtype == torch.float64 and torch.equal(a.loss, b.loss) and torch.equal(a.gradient, b.gradient)


@pytest.mark.parametrize("small", [-1, streaming.SMALL])
def test_half_anchors_are_computed_in_float32(small, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", small)
    anchors, p = pairing(dtype=torch.bfloat16)
    assert streaming.compare(LOSSES["contrastive"](), anchors, p, False, False).gradient.dtype == torch.float32


@pytest.mark.parametrize(("m", "D"), [(3, 50), (50, 3)])
def test_neither_a_tiles_rows_nor_its_similarities_pass_the_bound(m, D, monkeypatch):
    monkeypatch.setattr(streaming, "TILE", 1000)
    anchors, p = pairing(m=m, D=D, M=333)
    sizes = [(rows.numel(), S.numel()) for _, rows, S in streaming._Pass(LOSSES["contrastive"](), anchors, p, False).tiles()]
    assert len(sizes) > 1 and max(max(pair) for pair in sizes) <= 1000


# ------------------------------------------------------------------ memory


def peak_bytes(step):
    """The most memory that torch held at once during the step beyond what it held before."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        step()
    held = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def big(M, per_class, stored):
    """M rows of 4 numbers; each of the 6 anchors has `per_class` positives whatever M is, or a third of all with None."""
    torch.manual_seed(0)
    m = 6
    row_labels = torch.arange(M) % 3 if per_class is None else torch.arange(M) // per_class
    return F.normalize(torch.randn(m, 4)), Pairing(
        rows=F.normalize(torch.randn(M, 4)).to(stored),
        row_labels=row_labels,
        stamps=torch.zeros(M, dtype=torch.int64),
        labels=torch.arange(m),
        sound=torch.ones(m, dtype=torch.bool),
        ids=torch.arange(m) + M,
        row_ids=torch.arange(M),
    )


def test_the_yardstick_sees_what_a_dense_product_takes():
    anchors, p = big(10_000, 20, torch.float32)
    assert peak_bytes(lambda: anchors @ p.rows.T) >= 6 * 10_000 * 4


BANKS = [
    *((name, 20, torch.float32) for name in NAMES),
    *((name, None, torch.float32) for name in ("contrastive", "multi_similarity", "sup_con")),  # not triplet: see below
    ("multi_similarity", 20, torch.bfloat16),
    ("multi_similarity", None, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "positives", "stored"), BANKS)
def test_peak_memory_does_not_grow_with_the_bank(name, positives, stored, monkeypatch):
    monkeypatch.setattr(streaming, "TILE", 6 * 1500)
    monkeypatch.setattr(streaming, "count_related", partial(count_related, block=1000))
    monkeypatch.setattr(streaming, "list_related", partial(list_related, block=1000, step=300))
    peaks = []
    for M in (6_000, 8 * 6_000):
        anchors, p = big(M, positives, stored)
        peaks.append(peak_bytes(lambda v=anchors, p=p: streaming.compare(LOSSES[name](), v, p, False, True)))
    assert peaks[1] <= 1.02 * peaks[0]
    assert peaks[1] < 8 * 6_000 * 6 * 4 / 2, "half of what the similarities alone would take"


def test_triplets_with_many_positives_never_hold_a_half_bank_in_full_precision(monkeypatch):
    """Ranking takes a column per anchor at a time, so memory is that of COLUMNS similarities; the rows themselves stay half."""
    monkeypatch.setattr(streaming, "TILE", 1 << 14)
    monkeypatch.setattr(streaming, "COLUMNS", 1)
    monkeypatch.setattr(streaming, "MOST_LISTED", -1)
    peaks = {}
    for stored in (torch.float32, torch.bfloat16):
        anchors, p = pairing(m=3, M=20_000, D=64, dtype=torch.float32)
        p = p._replace(rows=p.rows.to(stored))
        peaks[stored] = peak_bytes(lambda p=p, v=anchors: streaming.compare(LOSSES["triplet"](), v, p, False, True))
    assert peaks[torch.bfloat16] - peaks[torch.float32] < 20_000 * 64 * 4 / 4
