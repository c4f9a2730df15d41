"""Whole steps under the interpreter against float64 autograd: banks, batches, shapes at the edges, half types, graphs."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import EVERY, IGNORED, LOSSES, THREE, check, memory_with, unit
from xbm import ContrastiveLoss, CrossBatchMemory, InputError, MultiSimilarityLoss
from xbm.engine import streaming
from xbm.engine import triton as kernels
from xbm.engine.pairing import References, pair
from xbm.engine.triton import plan
from xbm.engine.triton.primitives import CONTRASTIVE, CONTRASTIVE_ONE_PASS


@pytest.mark.parametrize("exclude", ["instance", "copy"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", EVERY)
def test_a_bank_gives_what_float64_autograd_gives(name, reduction, exclude):
    anchors, labels, ids, memory = memory_with()
    assert check(LOSSES[name](engine="triton", reduction=reduction), anchors, labels, memory, ids, exclude) > 0


@pytest.mark.parametrize(("D", "stored", "update", "reduction"), [
    (64, torch.float32, "queue", "balanced"), (65, torch.float32, "queue", "balanced"),
    (64, torch.float16, "queue", "balanced"), (64, torch.float16, "queue", "mean"), (65, torch.float16, "queue", "mean"),
    (64, torch.float32, "backprop", "balanced"),
])  # fmt: skip
def test_positives_met_on_the_way_and_those_listed_before_weigh_the_same(D, stored, update, reduction, monkeypatch):
    """Rows of up to 64 columns have their positives' gradient made in the same pass, wider ones get a list of them."""
    kinds = []
    settings = plan.settings
    monkeypatch.setattr(plan, "settings", lambda case: kinds.append(settings(case).kind) or settings(case))
    anchors, labels, ids, memory = memory_with(m=9, D=D, stored=stored, update=update)
    loss = ContrastiveLoss(engine="triton", reduction=reduction, margin=0.1)
    assert check(loss, anchors, labels, memory, ids, tolerance=1e-5 if stored == torch.float32 else 1e-3) > 0
    assert set(kinds) == {CONTRASTIVE_ONE_PASS.value if D == 64 else CONTRASTIVE.value}


@pytest.mark.parametrize("exclude", ["instance", "copy"])
@pytest.mark.parametrize("name", EVERY)
def test_a_batch_against_itself(name, exclude):
    anchors, labels, ids, _ = memory_with(m=13, D=16)
    labels, ids[:2] = labels % 3, ids[0]  # two views of one image
    reduction = "mean" if exclude == "copy" else "sum"
    assert check(LOSSES[name](engine="triton", reduction=reduction), anchors, labels, None, ids, exclude) > 0


@pytest.mark.parametrize("update", ["moving_average", "backprop"])
@pytest.mark.parametrize("name", EVERY)
def test_rows_that_are_set_aside_are_met_by_nobody(name, update):
    anchors, labels, ids, memory = memory_with(update=update)
    with_all = LOSSES[name](engine="triton")(anchors, labels, memory, ids=ids).item()
    memory.stamps[::3] = IGNORED
    assert 0 < check(LOSSES[name](engine="triton"), anchors, labels, memory, ids) != with_all


@pytest.mark.parametrize("shape", [(1, 1, 16, 0), (1, 64, 1, 3), (3, 65, 130, 0), (34, 2, 9, 1), (2, 40, 5, 40)])
def test_shapes_at_the_edges(shape):
    m, M, D, free = shape
    anchors, labels, ids, memory = memory_with(m, M, D, free=free)
    for name in THREE if m < 30 else ("contrastive",):
        anchors.grad = None
        check(LOSSES[name](engine="triton"), anchors, labels, memory, ids)


def test_a_queue_without_ids_knows_its_newest_rows_by_place():
    for size in (6, 40):  # a batch larger than the memory, and a lap
        memory = CrossBatchMemory(size, 8)
        for _ in range(5):
            v = unit(9, 8)
            memory.enqueue(v, torch.arange(9) % 3)
        anchors = v.clone().requires_grad_()
        check(ContrastiveLoss(engine="triton"), anchors, torch.arange(9) % 3, memory, None)
    other = v.flip(0).contiguous()
    loss, stats = ContrastiveLoss(engine="triton")(other, torch.arange(9) % 3, memory, return_stats=True)
    assert loss > 0 and int(stats.unsound) == 8, "one row of nine is its own mirror image"


def test_labels_of_any_stride_and_unaligned_anchors():
    anchors, labels, ids, memory = memory_with(m=6, D=17)
    loss_fn = ContrastiveLoss(engine="triton")
    expected = loss_fn(anchors, labels, memory, ids=ids)
    apart = torch.stack([labels, labels + 1], 1)[:, 0]
    shifted = torch.zeros(6 * 17 + 1)[1:].view(6, 17).copy_(anchors.detach())
    assert torch.equal(loss_fn(shifted, apart, memory, ids=ids), expected.detach())


def test_half_anchors_get_half_gradients_and_a_wide_loss():
    anchors, labels, ids, memory = memory_with(stored=torch.float16)
    v = anchors.detach().half().requires_grad_()
    loss = ContrastiveLoss(engine="triton")(v, labels, memory, ids=ids)
    loss.backward()
    assert loss.dtype == torch.float32 and v.grad.dtype == torch.float16


def test_second_derivatives_ask_for_the_reference():
    anchors, labels, ids, memory = memory_with()
    with pytest.raises(InputError, match='engine="reference"'):
        torch.autograd.grad(ContrastiveLoss(engine="triton")(anchors, labels, memory, ids=ids), anchors, create_graph=True)


def test_other_losses_fall_back_to_streaming():
    anchors, labels, ids, memory = memory_with()
    for loss_fn in (MultiSimilarityLoss(mining=False, engine="triton"), ContrastiveLoss(engine="triton")):
        wide = memory if not isinstance(loss_fn, ContrastiveLoss) else memory.to(torch.float64)
        v = anchors.detach().to(wide.rows.dtype)
        assert loss_fn._choose_engine(v, wide, None) is streaming
        loss_fn(v, labels, wide, ids=ids)


@pytest.mark.parametrize("name", ["contrastive", "triplet"])
@pytest.mark.parametrize("in_batch", [False, True], ids=["bank", "batch"])
def test_a_step_compiles_into_one_graph(name, in_batch):
    anchors, labels, ids, memory = memory_with(update="queue" if in_batch else "backprop")
    loss_fn, given = LOSSES[name](engine="triton"), None if in_batch else memory

    def step(v):
        return loss_fn(v, labels, given, ids=ids, return_stats=True)[0]

    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    twin = anchors.detach().clone().requires_grad_()
    expected = loss_fn(anchors, labels, given, ids=ids)
    expected.backward()
    of_rows, memory.rows.grad = memory.rows.grad, None
    got = fast(twin)
    got.backward()
    assert torch.equal(expected, got) and torch.equal(anchors.grad, twin.grad)
    assert in_batch or torch.equal(of_rows, memory.rows.grad)


def test_a_changed_hyper_parameter_reaches_the_compiled_step():
    anchors, labels, ids, memory = memory_with()
    loss_fn = ContrastiveLoss(engine="triton")
    fast = torch.compile(lambda v: loss_fn(v, labels, memory, ids=ids), fullgraph=True, backend="aot_eager")
    values = []
    for margin in (0.5, 0.25, 0, 0.125):
        loss_fn.margin = margin
        values.append(fast(anchors).item())
        assert values[-1] == loss_fn(anchors, labels, memory, ids=ids).item()
    assert len(set(values)) == 4


class Halved(ContrastiveLoss):
    name = "halved"

    def combine(self, p, n):
        combined = super().combine(p, n)
        return combined._replace(loss=combined.loss / 2)


def test_a_subclass_with_other_formulas_does_not_run_the_kernel_of_its_base():
    anchors, labels, ids, memory = memory_with()
    whole, half = (cls(engine="triton")(anchors, labels, memory, ids=ids).item() for cls in (ContrastiveLoss, Halved))
    assert half == pytest.approx(whole / 2, rel=1e-5) and half > 0


def test_the_same_bits_every_time():
    anchors, labels, ids, memory = memory_with(m=5, M=150)
    found = []
    for _ in range(2):
        v = anchors.detach().clone().requires_grad_()
        loss = MultiSimilarityLoss(engine="triton")(v, labels, memory, ids=ids)
        loss.backward()
        found.append((loss.detach(), v.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("update", [None, "queue", "backprop"])
@pytest.mark.parametrize("name", EVERY)
def test_live_references_get_their_gradient_beside_a_memory_or_alone(name, update):
    anchors, labels, ids, memory = memory_with(update=update or "queue")
    live = unit(6, 19).requires_grad_()
    live_labels, live_ids = labels[[0, 1, 4, 0, 2, 3]], torch.arange(6) + 900
    if update == "backprop":
        live_ids, ids = memory.ids[:6], memory.ids[10:15]
    results = []
    for engine, wide in (("triton", torch.float32), ("reference", torch.float64)):
        loss_fn = LOSSES[name](engine=engine)
        v, d = (x.detach().to(wide).requires_grad_() for x in (anchors, live))
        bank = None
        if update is not None:
            bank = CrossBatchMemory(memory.size, memory.dim, update, dtype=wide)
            bank.load_state_dict({k: b.to(wide) if k == "rows" else b for k, b in memory.state_dict().items()})
        loss, stats = loss_fn(
            v, labels, bank, ids=ids, references=d, reference_labels=live_labels, reference_ids=live_ids, return_stats=True
        )
        loss.backward()
        of_rows = bank.rows.grad if update == "backprop" else torch.zeros(1)
        _, *plain = (loss, v.grad, d.grad) if update == "backprop" else loss_fn.with_gradient(
            v, labels, bank, ids=ids, references=d, reference_labels=live_labels, reference_ids=live_ids
        )  # fmt: skip
        results.append([loss, v.grad, d.grad, of_rows, *plain, *stats.read().values()])
    assert results[1][2].norm() > 0
    for mine, exact in zip(*results):
        # gradients of the circle loss are 80 times as large, those of single columns too
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-5, atol=8e-5 if name == "circle" else 1e-6)


def test_beside_a_memory_without_gradient_only_that_of_the_references_is_computed():
    anchors, labels, ids, memory = memory_with()
    live = References(unit(6, 19), labels[[0, 1, 4, 0, 2, 3]], torch.arange(6) + 900)
    pairing = pair(anchors.detach(), labels, memory, ids, None, references=live)
    result = kernels.compare(ContrastiveLoss(), anchors.detach(), pairing, True, False, False, reference_gradient=True)
    assert result.row_gradient is None
    assert result.reference_gradient.untyped_storage().nbytes() == live.rows.nbytes  # and not of all rows


def test_nothing_is_excluded_from_a_batch_if_nothing_shall_be():
    anchors, labels, _, _ = memory_with()
    for name in THREE:
        check(LOSSES[name](engine="triton"), anchors, labels, None, None, "none")
        anchors.grad = None
