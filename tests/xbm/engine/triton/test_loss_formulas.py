"""The losses that add their lines to the shared kernels: margin, SupCon, lifted structure, N-pairs and circle.

The slow runs of the other tests here take them through every shape and way of pairing; these take one of each.
"""

import copy

import pytest
import torch

from tests.xbm.engine.triton.interpreted import FIVE, LOSSES, check, memory_with, oracle, unit
from xbm import CircleLoss, CrossBatchMemory, MarginLoss, NPairsLoss, SupConLoss
from xbm.engine import triton
from xbm.engine.triton import plan

AT_ODDS = pytest.mark.parametrize(
    ("name", "reduction", "stored", "exclude", "update"),
    [
        ("sup_con", "sum", torch.float32, "instance", "queue"),
        ("sup_con", "mean", torch.float16, "copy", "queue"),
        ("lifted_structure", "balanced", torch.float16, "instance", "queue"),
        ("n_pairs", "sum", torch.float32, "copy", "backprop"),
        ("margin", "balanced", torch.float32, "instance", "queue"),
        ("margin", "mean", torch.float16, "copy", "queue"),
        ("circle", "sum", torch.float16, "instance", "queue"),
    ],
)


@AT_ODDS
def test_one_of_every_option_gives_what_float64_autograd_gives(name, reduction, stored, exclude, update):
    anchors, labels, ids, memory = memory_with(m=4, M=67, D=19, stored=stored, update=update)
    tolerance = 1e-5 if stored == torch.float32 else 2e-5
    assert check(LOSSES[name](engine="triton", reduction=reduction), anchors, labels, memory, ids, exclude, tolerance) > 0


@pytest.mark.parametrize("shape", [(1, 1, 16, 0), (2, 40, 5, 40)], ids=["one row", "no row"])
@pytest.mark.parametrize("name", FIVE)
def test_sides_without_a_pair(name, shape):
    m, M, D, free = shape
    anchors, labels, ids, memory = memory_with(m, M, D, free=free)
    loss = check(LOSSES[name](engine="triton"), anchors, labels, memory, ids)
    if free:
        assert loss == 0
    else:  # the anchor shares the row's id and not its label; then its label and not its id, so that the row is a positive
        anchors.grad, memory.row_labels[0], ids[0] = None, labels[0], 7
        loss = check(LOSSES[name](engine="triton"), anchors, labels, memory, ids)
        assert (loss > 0) == (name == "margin")


@pytest.mark.parametrize("name", ["sup_con", pytest.param("circle", marks=pytest.mark.slow)])
def test_a_batch_against_itself(name):
    anchors, labels, ids, _ = memory_with(m=9, D=16)
    labels, ids[:2] = labels % 3, ids[0]
    assert check(LOSSES[name](engine="triton"), anchors, labels, None, ids, "copy") > 0


@pytest.mark.parametrize("stored", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loss_fn",
    [
        SupConLoss(temperature=0.004), NPairsLoss(temperature=0.004), CircleLoss(gamma=300.0, margin=0.4),
        CircleLoss(gamma=60.0, margin=1.5),
    ],
    ids=["sup_con", "n_pairs", "circle", "negative logits"],
)  # fmt: skip
@pytest.mark.parametrize("processors", [1, 3])
def test_exponents_that_no_number_can_hold(loss_fn, stored, processors, monkeypatch):
    """One program (or three) meets ever harder negatives, and another anchor's are all so easy that e^logit is 0."""
    monkeypatch.setattr(plan, "resources", lambda device: (processors, 227 * 1024))
    S = torch.cat([torch.full((40,), 0.4375), torch.full((40,), 0.5), torch.tensor([0.515625, 0.75, 0.9, 0.625])])
    rows = torch.cat([S[:, None], torch.zeros(84, 9)], 1)
    rows[torch.arange(84), torch.arange(84) % 9 + 1] = (1 - S**2).sqrt()
    memory = CrossBatchMemory(84, 10, dtype=stored)
    memory.enqueue(rows, torch.arange(84) // 83, torch.arange(84))
    anchors = torch.cat([torch.eye(1, 10), -torch.eye(1, 10)]).requires_grad_()
    loss_fn = copy.deepcopy(loss_fn)
    loss_fn.engine = "triton"
    check(loss_fn, anchors, torch.tensor([1, 1]), memory, torch.tensor([500, 501]), tolerance=1e-4)


def of_a_learned_temperature(engine, dtype, anchors, labels, memory, ids, temperature, **named):
    loss_fn = SupConLoss(temperature, learn_temperature=True, engine=engine).to(dtype)
    loss = loss_fn(anchors, labels, memory, ids=ids, **named)
    (loss * 3).backward()
    return loss, loss_fn.log_temperature.grad


@pytest.mark.parametrize("alone", [False, True], ids=["with the anchors", "alone"])
@pytest.mark.parametrize(("in_batch", "stored", "temperature"), [
    (False, torch.float32, 0.07), (True, torch.float32, 0.01),
    pytest.param(False, torch.float16, 0.01, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_learned_temperature_gets_its_gradient_from_the_same_pass(in_batch, stored, temperature, alone):
    anchors, labels, ids, memory = memory_with(m=6, M=45, stored=stored)
    if in_batch:
        labels = labels % 2
    wide = CrossBatchMemory(memory.size, memory.dim, dtype=torch.float64)
    wide.load_state_dict({k: b.double() if k == "rows" else b for k, b in memory.state_dict().items()})
    v, w = (anchors.detach().to(dtype).requires_grad_(not alone) for dtype in (torch.float32, torch.float64))
    loss, slope = of_a_learned_temperature("triton", torch.float32, v, labels, None if in_batch else memory, ids, temperature)
    value, exact = of_a_learned_temperature("reference", torch.float64, w, labels, None if in_batch else wide, ids, temperature)
    assert torch.isclose(loss.double(), value, rtol=2e-5) and torch.isclose(slope.double(), exact, rtol=1e-4) and exact != 0
    if not alone:
        assert (v.grad.double() - w.grad).norm() <= 5e-5 * w.grad.norm()


def test_a_learned_temperature_is_read_on_the_device():
    """It may change from step to step of a recorded graph, and one below its bound counts as the bound."""
    anchors, labels, ids, memory = memory_with(m=3, M=40)
    loss_fn = SupConLoss(0.1, learn_temperature=True, engine="triton")
    fixed = SupConLoss(0.1, engine="triton")
    for temperature in (0.1, 0.5):
        loss_fn.temperature = fixed.temperature = temperature
        learned, plain = (f(anchors, labels, memory, ids=ids) for f in (loss_fn, fixed))
        torch.testing.assert_close(learned, plain, rtol=2e-6, atol=0)
    loss_fn.log_temperature.data.fill_(-20)
    fixed.temperature = 0.01
    torch.testing.assert_close(*(f(anchors, labels, memory, ids=ids) for f in (loss_fn, fixed)), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_learned_temperature_in_one_graph():
    anchors, labels, ids, memory = memory_with(m=4, M=40)
    loss_fn = SupConLoss(0.07, learn_temperature=True, engine="triton")
    fast = torch.compile(lambda v: loss_fn(v, labels, memory, ids=ids), fullgraph=True, backend="aot_eager")
    results = []
    for call in (fast, lambda v: loss_fn(v, labels, memory, ids=ids)):
        v = anchors.detach().clone().requires_grad_()
        loss_fn.log_temperature.grad = None
        loss = call(v)
        loss.backward()
        results.append((loss, v.grad, loss_fn.log_temperature.grad))
    assert all(torch.equal(first, second) for first, second in zip(*results))


@pytest.mark.parametrize("update", ["queue", pytest.param("backprop", marks=pytest.mark.slow), None])
def test_live_references_beside_a_learned_temperature(update):
    anchors, labels, ids, memory = memory_with(m=5, M=50, update=update or "queue")
    live_ids = memory.ids[:6] if update == "backprop" else torch.arange(6) + 900
    ids = memory.ids[10:15] if update == "backprop" else ids
    documents, results = unit(6, 19), []
    for engine, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        v, live = (x.detach().to(dtype).requires_grad_() for x in (anchors, documents))
        bank = None
        if update is not None:
            bank = CrossBatchMemory(memory.size, memory.dim, update, dtype=dtype)
            bank.load_state_dict({k: b.to(dtype) if k == "rows" else b for k, b in memory.state_dict().items()})
        loss, slope = of_a_learned_temperature(
            engine, dtype, v, labels, bank, ids, 0.07, references=live, reference_labels=labels[[0, 1, 4, 0, 2, 3]],
            reference_ids=live_ids,
        )  # fmt: skip
        results.append([loss, slope, v.grad, live.grad, bank.rows.grad if update == "backprop" else torch.zeros(1)])
    for mine, exact in zip(*results):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2e-5, atol=2e-6)


def test_more_positives_than_a_list_holds(monkeypatch):
    monkeypatch.setattr(plan, "LIST_BUDGET", 1)
    monkeypatch.setattr(plan, "MIN_LISTED", 6)
    anchors, labels, ids, memory = memory_with(m=2, M=40, D=17, classes=2)
    check(SupConLoss(engine="triton"), anchors, labels, memory, ids)


def test_the_same_bits_every_time():
    anchors, labels, ids, memory = memory_with(m=3, M=100)
    found = [SupConLoss(engine="triton").with_gradient(anchors, labels, memory, ids=ids) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*found))


@pytest.mark.parametrize("loss_fn", [NPairsLoss(temperature=-0.1), CircleLoss(gamma=-1), MarginLoss(boundary=0)])
def test_hyper_parameters_without_sense_are_left_to_the_other_engines(loss_fn):
    assert not triton.supports(loss_fn, torch.zeros(3, 8), torch.zeros(3, 8))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FIVE)
def test_random_odd_shapes(name, seed, monkeypatch):
    torch.manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    monkeypatch.setattr(plan, "SMALL", one_of(-1, 1 << 18))
    m, M, D = one_of(1, 2, 7, 33, 65), one_of(1, 3, 31, 64, 65, 127), one_of(1, 8, 19, 64, 65, 130)
    stored, update = one_of(torch.float32, torch.float16), one_of("queue", "queue", "moving_average")
    anchors, labels, ids, memory = memory_with(
        m, M, D, stored=stored, update=update, classes=one_of(1, 2, 4, 30), free=one_of(0, M // 3), spread=one_of(0.5, 0.9, 2.0)
    )
    reduction, exclude = one_of("sum", "mean", "balanced"), one_of("instance", "copy")
    loss_fn = LOSSES[name](engine="triton", reduction=reduction)
    value, *_ = oracle(loss_fn, anchors, labels, memory, ids, exclude)
    anchors.grad = None
    if D == 1 and name == "margin":
        pytest.skip("equal rows have distance 0, where rounding decides")
    # a small loss is what two numbers near 1/τ differ by: its error is theirs (that of the streaming engine is larger)
    tolerance = min(1e-2, 3e-5 * max(1.0, 0.1 / max(float(value), 1e-9)))
    assert check(loss_fn, anchors, labels, memory, ids, exclude, tolerance) >= 0
