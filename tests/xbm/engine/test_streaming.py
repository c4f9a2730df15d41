"""One pass over the bank: the same in every form, and memory that does not grow with the bank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.known import NAMES
from tests.xbm.engine.pairs import pairing
from xbm.engine import streaming
from xbm.engine.dense import reference
from xbm.engine.pairing import Pairing, list_related
from xbm.losses import LOSSES
from xbm.memory import CrossBatchMemory

FORMS = {
    "all at once": {},
    "all at once, anchors in turn": {"TILE": 6 * 9, "COLUMNS": 200},
    "one tile": {"SMALL": -1},
    "tiles of one row": {"SMALL": -1, "TILE": 1},
    "single rows": {"SMALL": -1, "TILE": 6 * 9, "SPARSE": 1.0},
    "whole tiles": {"SMALL": -1, "TILE": 6 * 9, "SPARSE": -1.0},
    "fixed shapes": {"SMALL": -1, "TILE": 6 * 9, "MOST_LISTED": -1},
    "fixed shapes, anchors in turn": {"SMALL": -1, "TILE": 6 * 9, "MOST_LISTED": -1, "COLUMNS": 200},
    "four anchors together": {"SMALL": -1, "TILE": 6 * 9, "TOGETHER": 4},
    "four anchors together, all at once": {"TOGETHER": 4},
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
    value, *stats = reference(loss_fn, v, p._replace(rows=rows), True)
    value.backward()
    found = streaming.compare(loss_fn, anchors, p, row_gradient=True, stats=True)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-11)
    assert torch.allclose(found.gradient, v.grad, atol=1e-10, rtol=0)
    assert torch.allclose(found.row_gradient, rows.grad, atol=1e-10, rtol=0)
    assert all(torch.allclose(a.double(), b.double()) for a, b in zip(found.statistics, stats))


@pytest.mark.parametrize("small", [-1, streaming.SMALL])
@pytest.mark.parametrize("name", NAMES)
def test_an_unsound_anchor_contributes_nothing_where_shapes_are_fixed(name, small, monkeypatch):
    """What another device does, on this one: the anchor could not raise there."""
    monkeypatch.setattr(streaming, "MOST_LISTED", -1)
    monkeypatch.setattr(streaming, "SMALL", small)
    anchors, p = pairing()
    p = p._replace(sound=torch.tensor([True, False, True, True, False, True]))
    found = streaming.compare(LOSSES[name](), anchors, p, stats=True)
    kept = p.sound.nonzero()[:, 0]
    some = p._replace(labels=p.labels[kept], sound=p.sound[kept], ids=p.ids[kept])
    (expected,) = reference(LOSSES[name](), anchors[kept], some, False)
    assert torch.allclose(found.loss * len(anchors), expected * len(kept))
    assert found.statistics[0][~p.sound].sum() == found.statistics[1][~p.sound].sum() == 0


@pytest.mark.parametrize("together", [4, streaming.TOGETHER])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_batch_the_two_gradients_are_those_of_the_anchors_two_roles(name, together, monkeypatch):
    monkeypatch.setattr(streaming, "TOGETHER", together)
    anchors, p = pairing(m=9, M=9, self_by="slot", classes=2)
    own = torch.arange(9)
    p = p._replace(row_labels=p.labels, stamps=own, own=own)
    v = anchors.clone().requires_grad_()
    (value,) = reference(LOSSES[name](), v, p._replace(rows=v), False)
    value.backward()
    found = streaming.compare(LOSSES[name](), anchors, p._replace(rows=anchors, in_batch=True), row_gradient=True)
    assert torch.allclose(found.gradient + found.row_gradient, v.grad, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_few_anchors_at_a_time_give_references_and_memory_the_same_gradients(name, monkeypatch):
    torch.manual_seed(0)
    anchors, references, rows = (F.normalize(torch.randn(n, 5, dtype=torch.float64)) for n in (11, 7, 23))
    labels, ids = torch.arange(11) % 4, torch.arange(11)
    memory = CrossBatchMemory(23, 5, dtype=torch.float64)
    memory.enqueue(rows, torch.arange(23) % 5, torch.arange(23))

    def step(together):
        monkeypatch.setattr(streaming, "TOGETHER", together)
        v, d = anchors.clone().requires_grad_(), references.clone().requires_grad_()
        given = {"ids": ids, "references": d, "reference_labels": labels[:7], "reference_ids": ids[:7]}
        loss, stats = LOSSES[name](engine="streaming")(v, labels, memory, exclude="instance", return_stats=True, **given)
        loss.backward()
        return loss.detach(), v.grad, d.grad, *vars(stats).values()

    for few, all_at_once in zip(step(3), step(1000), strict=True):
        assert torch.allclose(few.double(), all_at_once.double(), rtol=0, atol=1e-12)


def test_the_working_memory_does_not_grow_with_the_anchors():
    """Beyond the anchors' gradient: the loss is then as small a part of a large batch as of a small one."""
    rows = F.normalize(torch.randn(1024, 32))
    memory, loss_fn = CrossBatchMemory(1024, 32), LOSSES["contrastive"]()
    memory.enqueue(rows, torch.arange(1024) // 4, torch.arange(1024))

    def extra(m):
        v, labels, ids = F.normalize(torch.randn(m, 32)), torch.arange(m) // 4, torch.arange(m) + 1024
        return peak_bytes(lambda: loss_fn.with_gradient(v, labels, memory, ids=ids)) - v.nbytes

    few, many = extra(streaming.TOGETHER), extra(8 * streaming.TOGETHER)
    assert many < 1.3 * few, (few, many)


def test_rows_get_a_gradient_only_if_asked():
    anchors, p = pairing()
    assert streaming.compare(LOSSES["contrastive"](), anchors, p).row_gradient is None


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("small", [-1, streaming.SMALL])
def test_rows_are_widened_to_the_anchors_type(stored, small, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", small)
    anchors, p = pairing()
    narrow = p._replace(rows=p.rows.to(stored))
    wide = p._replace(rows=narrow.rows.double())
    for name in ("multi_similarity", "triplet"):
        a, b = (streaming.compare(LOSSES[name](), anchors, each) for each in (narrow, wide))
        assert a.gradient.dtype == torch.float64 and torch.equal(a.loss, b.loss) and torch.equal(a.gradient, b.gradient)


@pytest.mark.parametrize("small", [-1, streaming.SMALL])
def test_half_anchors_are_computed_in_float32(small, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", small)
    anchors, p = pairing(dtype=torch.bfloat16)
    assert streaming.compare(LOSSES["contrastive"](), anchors, p).gradient.dtype == torch.float32


@pytest.mark.parametrize(("m", "D"), [(3, 50), (50, 3)])
def test_neither_a_tiles_rows_nor_its_similarities_pass_the_bound(m, D, monkeypatch):
    monkeypatch.setattr(streaming, "TILE", 1000)
    anchors, p = pairing(m=m, D=D, M=333)
    height = streaming.tile_height(anchors)
    assert 1 < height < len(p.rows) and max(height * m, height * D) <= 1000


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
    monkeypatch.setattr(streaming, "list_related", partial(list_related, block=1000, step=300))
    peaks = []
    for M in (6_000, 8 * 6_000):
        anchors, p = big(M, positives, stored)
        peaks.append(peak_bytes(lambda v=anchors, p=p: streaming.compare(LOSSES[name](), v, p, stats=True)))
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
        peaks[stored] = peak_bytes(lambda p=p, v=anchors: streaming.compare(LOSSES["triplet"](), v, p, stats=True))
    assert peaks[torch.bfloat16] - peaks[torch.float32] < 20_000 * 64 * 4 / 4


# ------------------------------------------------------------------ no loop over anchors, no waiting, no lists of pairs


class Seen(TorchDispatchMode):
    """How many operations ran, and how many numbers the largest result held."""

    def __init__(self):
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result


def wide_bank(m, M, device="cpu", dim=16):
    """Each anchor has two positives in the bank; most of its negatives pass every loss's threshold."""
    torch.manual_seed(0)
    anchors = F.normalize(1 + 0.3 * torch.randn(m, dim))
    rows = F.normalize(1 + 0.3 * torch.randn(M, dim))
    whole = [torch.arange(M) // 2, torch.zeros(M, dtype=torch.int64), torch.arange(m), torch.ones(m, dtype=torch.bool)]
    row_labels, stamps, labels, sound = (x.to(device) for x in whole)
    ids, row_ids = torch.arange(m, device=device) + M, torch.arange(M, device=device)
    return anchors.to(device), Pairing(rows.to(device), row_labels, stamps, labels, sound, ids, row_ids)


def cost(step, m, M, device="cpu"):
    """A step's operations and largest result. On "meta" tensors have no values: whatever has to look at one raises."""
    anchors, p = wide_bank(m, M, device)
    with Seen() as seen:
        step(anchors, p)
    return seen


def one_pass(name):
    return lambda anchors, p: streaming._compare(
        LOSSES[name](), anchors, p, (False, False), True, None
    )  # autocast knows no "meta"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_operations_does_not_grow_with_the_anchors(name, device, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", -1)
    few, many = (cost(one_pass(name), m, 1000, device).operations for m in (8, 64))
    assert many <= few + 4, "one more block of listed positives at most"


@pytest.mark.parametrize("name", NAMES)
def test_off_the_cpu_nothing_waits_for_a_value(name):
    for M in (50, 30_000):  # all at once; tiles, and anchors in turn for triplets
        cost(one_pass(name), 12, M, "meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_no_result_holds_more_numbers_than_the_similarities(name, device):
    assert cost(one_pass(name), 12, 2000, device).largest <= 16 * 2000, "the rows' or the similarities' numbers"


def loop_over_anchors(anchors, p):
    positive, negative = p.masks()  # (M, m)
    losses = []
    for i in range(len(anchors)):
        s = p.rows @ anchors[i]
        losses.append(((s - 0.5).relu() * negative[:, i]).sum() + ((1 - s) * positive[:, i]).sum())
    return torch.stack(losses).mean()


def looks_at_a_value(anchors, p):
    S = p.rows @ anchors.T
    return S.relu().sum() if (S > 0.5).any().item() else S.sum()


def lists_pairs(anchors, p):
    row, anchor = torch.where(p.masks()[1])
    return ((p.rows[row] * anchors[anchor]).sum(1) - 0.5).relu().sum()


def all_triplets(anchors, p):
    positive, negative = p.masks()
    S = p.rows @ anchors.T
    i, j = positive.nonzero(as_tuple=True)
    return (0.1 + S - S[i, j][:, None, None] + negative).relu().sum()  # (pairs, M, m)


def test_the_mistakes_of_others_are_seen():
    few, many = (cost(loop_over_anchors, m, 1000).operations for m in (8, 64))
    assert many > few + 4
    for mistaken in (looks_at_a_value, lists_pairs, all_triplets):
        with pytest.raises((RuntimeError, NotImplementedError)):
            cost(mistaken, 12, 50, "meta")
    for mistaken in (lists_pairs, all_triplets):
        assert cost(mistaken, 12, 2000).largest > 16 * 2000
