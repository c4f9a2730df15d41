"""Every loss x engine x reduction x in-batch/bank against float64 autograd; the GPW weights; what the call refuses."""

import pytest
import torch
import torch.nn.functional as F

import xbm.engine.streaming as streaming
from tests.known import NAMES
from tests.xbm.losses.scene import masks_by_hand, scene
from xbm import ContrastiveLoss, CrossBatchMemory, InputError, MultiSimilarityLoss, TripletLoss
from xbm.losses import LOSSES, MetricLearningLoss, PairLoss
from xbm.losses.pair import REDUCTIONS

# how the streaming engine may go about it: rows per tile, share of negatives added singly, share of positives listed
WAYS = {
    "at once": {},
    "one tile": {"SMALL": -1},
    "small tiles, single rows": {"SMALL": -1, "TILE": 19 * 17, "SPARSE": 1.0},
    "small tiles, whole": {"SMALL": -1, "TILE": 19 * 17, "SPARSE": -1.0},
    "fixed shapes": {"SMALL": -1, "TILE": 19 * 30, "MOST_LISTED": -1},
}


def set_way(monkeypatch, way):
    for name, value in WAYS[way].items():
        monkeypatch.setattr(streaming, name, value)


def oracle(loss_fn, s, exclude, bank):
    """Value and gradient by plain float64 autograd over hand-made masks."""
    v = s.anchors.detach().double().requires_grad_()
    if bank:
        rows = s.memory.rows.detach().double()
        positive, negative = masks_by_hand(s, exclude)
    else:
        rows = v
        same_id = s.ids[:, None] == s.ids if exclude == "instance" else torch.eye(len(s.ids), dtype=torch.bool)
        same = s.labels[:, None] == s.labels
        positive, negative = same & ~same_id, ~same & ~same_id
    value = loss_fn.dense(v @ rows.T, positive, negative).sum() / len(v)
    value.backward()
    return value.detach(), v.grad, positive, negative


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_says_whether_its_reductions_are_one(name):
    s = scene()
    values = {LOSSES[name](reduction=reduction)(s.anchors, s.labels, s.memory, ids=s.ids).item() for reduction in REDUCTIONS}
    assert LOSSES[name].one_reduction == (len(values) == 1)


@pytest.mark.parametrize("way", [*WAYS, "reference"])
@pytest.mark.parametrize("exclude", ["instance", "copy"])
@pytest.mark.parametrize("bank", [True, False], ids=["bank", "batch"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_float64_autograd(name, reduction, bank, exclude, way, monkeypatch):
    if way != "reference":
        set_way(monkeypatch, way)
    s = scene()
    loss_fn = LOSSES[name](reduction=reduction, engine="reference" if way == "reference" else "streaming", exclude=exclude)
    value, gradient, positive, negative = oracle(loss_fn, s, exclude, bank)
    loss, stats = loss_fn(s.anchors, s.labels, s.memory if bank else None, ids=s.ids, return_stats=True)
    loss.backward()
    assert value > 0
    assert torch.allclose(loss, value, atol=1e-10, rtol=1e-10)
    assert torch.allclose(s.anchors.grad, gradient, atol=1e-10, rtol=0)
    alone, direct = loss_fn.with_gradient(s.anchors, s.labels, s.memory if bank else None, ids=s.ids)
    assert torch.allclose(alone, value, atol=1e-10, rtol=1e-10) and torch.allclose(direct, gradient, atol=1e-10, rtol=0)
    assert not alone.requires_grad and not direct.requires_grad
    # a valid pair is one with a non-zero weight
    S = s.anchors.detach() @ (s.memory.rows if bank else s.anchors).detach().T
    w = loss_fn.weights(S, positive, negative)
    assert stats.valid_positives.tolist() == ((w != 0) & positive).sum(1).tolist()
    assert stats.valid_negatives.tolist() == ((w != 0) & negative).sum(1).tolist()
    inf = torch.inf
    assert torch.allclose(stats.hardest_negative, S.masked_fill(~negative, -inf).amax(1))
    assert torch.allclose(stats.easiest_positive, S.masked_fill(~positive, -inf).amax(1))
    assert torch.allclose(stats.hardest_positive, S.masked_fill(~positive, inf).amin(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_the_bank_equals_float64_autograd(name, reduction, way, monkeypatch):
    set_way(monkeypatch, way)
    found = {}
    for engine in ("reference", "streaming"):
        s = scene(update="backprop")
        (LOSSES[name](reduction=reduction, engine=engine)(s.anchors, s.labels, s.memory, ids=s.ids) * 3).backward()
        found[engine] = (s.anchors.grad, s.memory.rows.grad)
    for a, b in zip(found["reference"], found["streaming"]):
        assert a.abs().max() > 0
        assert torch.allclose(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_half_banks_agree_with_the_oracle_on_the_rounded_rows(name, stored, way, monkeypatch):
    set_way(monkeypatch, way)
    s = scene(seed=5, dtype=torch.float32, stored=stored)
    loss_fn = LOSSES[name](engine="streaming")
    value, gradient, _, _ = oracle(loss_fn, s, "instance", bank=True)
    loss = loss_fn(s.anchors, s.labels, s.memory, ids=s.ids)
    loss.backward()
    assert abs(loss.double() - value) <= 1e-5 * value
    assert (s.anchors.grad.double() - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("given_", [torch.bfloat16, torch.float16])
def test_half_anchors_get_half_gradients_and_a_wide_loss(given_):
    s = scene(dtype=torch.float32)
    v = s.anchors.detach().to(given_).requires_grad_()
    loss = ContrastiveLoss()(v, s.labels, s.memory, ids=s.ids)
    loss.backward()
    assert loss.dtype == torch.float32 and v.grad.dtype == given_
    exact = s._replace(anchors=v.detach().float())
    value, gradient, _, _ = oracle(ContrastiveLoss(), exact, "instance", bank=True)
    assert torch.allclose(loss.double(), value, rtol=1e-5)
    assert torch.allclose(v.grad.double(), gradient, atol=1e-2)


def test_a_loss_scale_that_float16_cannot_hold_reaches_the_gradient():
    s = scene(dtype=torch.float32)
    plain, scaled = (s.anchors.detach().half().requires_grad_() for _ in range(2))
    ContrastiveLoss()(plain, s.labels, s.memory, ids=s.ids).backward()
    (ContrastiveLoss()(scaled, s.labels, s.memory, ids=s.ids) * 2**16).backward()
    assert torch.equal(scaled.grad, (plain.grad.float() * 2**16).half())
    assert (scaled.grad.isfinite() & (scaled.grad != 0)).any()


def test_ids_beside_rows_without_ids_are_refused_whatever_is_excluded():
    s = scene()
    memory = CrossBatchMemory(20, 19, dtype=torch.float64)
    memory.enqueue(s.anchors.detach(), s.labels)
    for exclude in ("instance", "copy"):
        with pytest.raises(InputError, match="rows without ids"):
            ContrastiveLoss(exclude=exclude)(s.anchors, s.labels, memory, ids=s.ids)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_autocast_does_not_round_the_anchors(engine):
    s = scene(dtype=torch.float32)
    loss_fn = ContrastiveLoss(engine=engine)
    plain = loss_fn(s.anchors, s.labels, s.memory, ids=s.ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss_fn(s.anchors, s.labels, s.memory, ids=s.ids)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_derivatives_in_the_similarities(name, reduction):
    loss_fn = LOSSES[name](reduction=reduction)
    s = scene(seed=3)
    positive, negative = masks_by_hand(s, "copy")
    S = (s.anchors @ s.memory.rows.T).detach().requires_grad_()
    (loss_fn.dense(S, positive, negative).sum() / len(S)).backward()
    w = loss_fn.weights(S.detach(), positive, negative)
    derivative = len(S) * S.grad
    assert torch.allclose(torch.where(negative, w, 0), torch.where(negative, derivative, 0), atol=1e-10)
    assert torch.allclose(torch.where(positive, w, 0), torch.where(positive, -derivative, 0), atol=1e-10)
    assert (w[~(positive | negative)] == 0).all()
    if name != "sup_con":  # see its docstring
        assert (w >= 0).all()


@pytest.mark.parametrize("way", [*WAYS, "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_no_pairs_no_loss_no_gradient(name, way, monkeypatch):
    if way != "reference":
        set_way(monkeypatch, way)
    loss_fn = LOSSES[name](engine="reference" if way == "reference" else "streaming")
    v = F.normalize(torch.randn(3, 19)).requires_grad_()
    empty = CrossBatchMemory(10, 19)
    for memory, anchors, labels in (
        (empty, v, torch.arange(3)),  # an empty bank
        (None, v[:0], torch.arange(0)),  # no anchors
        (None, v[:1], torch.arange(1)),  # nobody to compare with
    ):
        loss, stats = loss_fn(anchors, labels, memory, return_stats=True)
        loss.backward()
        assert loss == 0 and loss.shape == () and (v.grad == 0).all()
        assert all(len(x) == len(anchors) for x in stats.read().values())


@pytest.mark.parametrize("way", [*WAYS, "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_anchors_with_only_positives_or_only_negatives(name, way, monkeypatch):
    if way != "reference":
        set_way(monkeypatch, way)
    s = scene()
    loss_fn = LOSSES[name](engine="reference" if way == "reference" else "streaming")
    for labels in (torch.zeros(7, dtype=torch.int64), torch.full((7,), 999)):
        s.memory.row_labels.zero_()
        s.anchors.grad = None
        loss = loss_fn(s.anchors, labels, s.memory, ids=s.ids)
        loss.backward()
        value, gradient, _, _ = oracle(loss_fn, s._replace(labels=labels), "instance", bank=True)
        assert torch.allclose(loss, value, atol=1e-10)
        assert torch.allclose(s.anchors.grad, gradient, atol=1e-10)


# ------------------------------------------------------------------ who is the anchor itself


def test_own_copy_is_left_out_by_id_even_where_rounding_moves_it():
    """`S < 1 − 1e-5` lets about half of the bf16 copies through; their 'positive pair' would add 1 − S > 0."""
    v = F.normalize(torch.randn(64, 128))
    memory = CrossBatchMemory(64, 128, dtype=torch.bfloat16)
    ids = torch.arange(64)
    memory.enqueue(v, ids, ids)
    own = (v * memory.embeddings.float()).sum(1)
    assert ((own < 1 - 1e-5).sum() > 10) and ((own >= 1 - 1e-5).sum() > 10), "the mistaken test would let some through"
    for exclude in ("instance", "copy"):
        _, stats = ContrastiveLoss(exclude=exclude)(v, ids, memory, ids=ids, return_stats=True)
        assert stats.valid_positives.sum() == 0
    _, stats = ContrastiveLoss()(v, ids, memory, return_stats=True)  # without ids: by position
    assert stats.valid_positives.sum() == 0


def test_older_copies_are_positives_only_if_asked():
    v, w = F.normalize(torch.randn(2, 8)), F.normalize(torch.randn(2, 8))
    memory = CrossBatchMemory(6, 8)
    labels, ids = torch.tensor([0, 1]), torch.tensor([5, 6])
    for rows in (w, w, v):
        memory.enqueue(rows, labels, ids)
    counts = {}
    for exclude in ("instance", "copy"):
        _, stats = ContrastiveLoss()(v, labels, memory, ids=ids, exclude=exclude, return_stats=True)
        counts[exclude] = stats.valid_positives.tolist()
    assert counts == {"instance": [0, 0], "copy": [2, 2]}


def test_mining_never_sees_the_anchor_itself():
    """With the self pair still in, max P would be 1 and min over it would not mind; as a 'negative' it would be the hardest."""
    v = F.normalize(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]))
    labels, ids = torch.tensor([0, 0, 1]), torch.tensor([4, 5, 6])
    memory = CrossBatchMemory(3, 2)
    memory.enqueue(v, labels, ids)
    _, stats = MultiSimilarityLoss()(v, labels, memory, ids=ids, return_stats=True)
    assert torch.allclose(stats.easiest_positive[:2], torch.tensor([0.6, 0.6]))
    assert torch.allclose(stats.hardest_negative, torch.tensor([-1.0, -0.6, -0.6]))


def test_batch_positions_are_not_bank_slots():
    """After a lap the batch's rows lie anywhere in the bank; leaving out slots 0..m−1 would be wrong."""
    memory = CrossBatchMemory(5, 8)
    for start in range(0, 9, 3):
        v = F.normalize(torch.randn(3, 8))
        memory.enqueue(v, torch.full((3,), 1), torch.arange(start, start + 3))
    for ids in (None, torch.arange(6, 9)):
        memory_ = memory
        if ids is None:
            memory_ = CrossBatchMemory(5, 8)
            for start in range(3):
                memory_.enqueue(v if start == 2 else F.normalize(torch.randn(3, 8)), torch.full((3,), 1))
        _, stats = ContrastiveLoss()(v, torch.full((3,), 1), memory_, ids=ids, return_stats=True)
        assert stats.valid_positives.tolist() == [4, 4, 4]
        assert (stats.easiest_positive < 1 - 1e-6).all()


def test_counts_average_over_all_anchors():
    """An anchor without valid negatives counts as 0 and stays in the mean."""
    v = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.0], [-1.0, 0.2]])).requires_grad_()
    labels = torch.tensor([0, 1, 2, 2])
    loss, stats = ContrastiveLoss(reduction="mean")(v, labels, return_stats=True)
    assert stats.valid_negatives.tolist() == [1, 1, 0, 0]
    S = v @ v.T
    by_hand = ((S[0, 1] - 0.5) + (S[1, 0] - 0.5) + (1 - S[2, 3]) + (1 - S[3, 2])) / 4
    assert torch.allclose(loss, by_hand)


@pytest.mark.parametrize("exclude", ["instance", "copy"])
def test_keyed_memories_leave_out_the_anchors_slot(exclude):
    memory = CrossBatchMemory(9, 4, "moving_average")
    v, ids = F.normalize(torch.randn(9, 4)), torch.arange(9)
    memory.enqueue(v[:6], torch.zeros(6, dtype=torch.int64), ids[:6])
    _, stats = ContrastiveLoss()(v, torch.zeros(9, dtype=torch.int64), memory, ids=ids, exclude=exclude, return_stats=True)
    assert stats.valid_positives.tolist() == [5] * 6 + [6] * 3


# ------------------------------------------------------------------ the call


def test_a_loss_call_never_changes_the_memory():
    s = scene()
    before = {name: b.clone() for name, b in s.memory.state_dict().items()}
    for loss_fn in (ContrastiveLoss(), TripletLoss(), MultiSimilarityLoss()):
        loss_fn(s.anchors, s.labels, s.memory, ids=s.ids).backward()
    assert all(torch.equal(before[name], b) for name, b in s.memory.state_dict().items())


def test_statistics_answer_by_name_and_by_attribute():
    s = scene()
    _, stats = ContrastiveLoss()(s.anchors, s.labels, s.memory, ids=s.ids, return_stats=True)
    assert stats["valid_negatives"] is stats.valid_negatives
    assert set(stats.read()) == {
        "valid_positives", "valid_negatives", "hardest_negative", "easiest_positive", "hardest_positive"
    }  # fmt: skip
    assert not stats.valid_negatives.is_floating_point()


def test_unsound_anchors_are_told_on_reading_where_the_device_was_not_stopped():
    s = scene()
    _, stats = ContrastiveLoss()(s.anchors, s.labels, s.memory, ids=s.ids, return_stats=True)
    stats.unsound = torch.tensor(2)  # as a GPU would have counted
    with pytest.raises(InputError, match="2 anchors were skipped"):
        stats.read()


def test_second_derivatives_ask_for_the_reference():
    s = scene()
    loss = ContrastiveLoss(engine="streaming")(s.anchors, s.labels, s.memory, ids=s.ids)
    with pytest.raises(InputError, match='engine="reference"'):
        torch.autograd.grad(loss, s.anchors, create_graph=True)


def unit(m, dim):
    return F.normalize(torch.randn(m, dim))


BAD_CALLS = {
    "dimension": (lambda m, v: ContrastiveLoss()(unit(3, 5), torch.arange(3), m), "expected anchors of dimension 4, got 5"),
    "labels": (lambda m, v: ContrastiveLoss()(v, torch.arange(2), m), "3 embeddings but labels of shape"),
    "length": (lambda m, v: ContrastiveLoss()(v * 3, torch.arange(3), m), "has length 3, not 1"),
    "NaN": (lambda m, v: ContrastiveLoss()(v * torch.nan, torch.arange(3), m), "NaN"),
    "not the rows enqueued last": (lambda m, v: ContrastiveLoss()(unit(3, 4), torch.arange(3), m), "pass ids to enqueue"),
    "other order": (lambda m, v: ContrastiveLoss()(v.flip(0), torch.arange(3).flip(0), m), "in the same order"),
    "fewer": (lambda m, v: ContrastiveLoss()(v[1:], torch.arange(1, 3), m), "not the rows enqueued last"),
    "ids, but rows have none": (
        lambda m, v: ContrastiveLoss()(v, torch.arange(3), m, ids=torch.arange(3)),
        "holds rows without ids",
    ),
    "instance without ids": (lambda m, v: ContrastiveLoss(exclude="instance")(v, torch.arange(3), m), "pass ids"),
    "the other side of pairs": (
        lambda m, v: ContrastiveLoss()(unit(3, 4), torch.arange(3), m),
        'exclude="none" or use TwoTower',
    ),
    "exclude": (lambda m, v: ContrastiveLoss()(v, torch.arange(3), m, exclude="cpy"), "did you mean 'copy'"),
    "exclude=False": (lambda m, v: ContrastiveLoss()(v, torch.arange(3), m, exclude=False), "unknown exclude False"),
    "exclude=False with_gradient": (
        lambda m, v: ContrastiveLoss().with_gradient(v, torch.arange(3), m, exclude=False),
        "unknown exclude False",
    ),
    "pairs of a miner": (lambda m, v: ContrastiveLoss()(v, torch.arange(3), (v, v)), "must be a CrossBatchMemory, got tuple"),
    "pairs of a miner, with_gradient": (
        lambda m, v: ContrastiveLoss().with_gradient(v, torch.arange(3), (v, v)),
        "must be a CrossBatchMemory, got tuple",
    ),
    "pairs of a miner, wrapped": (
        lambda m, v: MetricLearningLoss(lambda *_, indices_tuple: v.sum())(v, torch.arange(3), (v, v)),
        "must be a CrossBatchMemory, got tuple",
    ),
    "references without labels": (lambda m, v: ContrastiveLoss()(v, None, m, references=v), "pass labels"),
    "engine": (lambda m, v: ContrastiveLoss(engine="streamin"), "did you mean 'streaming'"),
    "reduction": (lambda m, v: ContrastiveLoss(reduction="men"), "did you mean 'mean'"),
    "device": (
        lambda m, v: ContrastiveLoss()(v.to("meta"), torch.arange(3, device="meta"), m),
        "are on meta, the memory on cpu",
    ),
    "keyed without ids": (
        lambda m, v: ContrastiveLoss()(v, torch.arange(3), CrossBatchMemory(4, 4, "backprop")),
        "pass ids to the loss",
    ),
}


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_loss_that_states_its_plain_formula_only_says_what_it_lacks(engine):
    class DenseOnly(PairLoss):
        def dense(self, S, positive, negative):
            return ((1 - S) * positive).sum(1)

    with pytest.raises(NotImplementedError, match="DenseOnly: the loss must state `dense`, `negative` and `positive`"):
        DenseOnly(engine=engine)(unit(4, 5), torch.arange(4) // 2)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_told_in_one_sentence(case):
    call, message = BAD_CALLS[case]
    memory, v = CrossBatchMemory(7, 4), unit(3, 4)
    memory.enqueue(v, torch.arange(3))
    with pytest.raises(InputError, match=message) as error:
        call(memory, v)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_compiles_into_one_graph(name):
    loss_fn = LOSSES[name]()
    s = scene(dtype=torch.float32)
    fast = torch.compile(lambda v: loss_fn(v, s.labels, s.memory, ids=s.ids), fullgraph=True, backend="aot_eager")
    twin = s.anchors.detach().clone().requires_grad_()
    expected, got = loss_fn(s.anchors, s.labels, s.memory, ids=s.ids), fast(twin)
    expected.backward()
    got.backward()
    assert torch.allclose(expected, got) and torch.allclose(s.anchors.grad, twin.grad)


def test_the_gradient_alone_is_refused_where_the_rows_have_one_too():
    memory = CrossBatchMemory(4, 3, update="backprop")
    with pytest.raises(InputError, match="with_gradient does not support update='backprop'"):
        ContrastiveLoss().with_gradient(torch.eye(3), torch.arange(3), memory, ids=torch.arange(3))


def test_the_gradient_alone_of_no_anchors_and_without_a_graph():
    loss, gradient = ContrastiveLoss().with_gradient(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert loss == 0 and gradient.shape == (0, 3)
    with torch.no_grad():
        loss, gradient = ContrastiveLoss().with_gradient(torch.eye(2)[[0, 0]], torch.tensor([0, 1]))
    assert loss == 0.5 and gradient.tolist() == [[1.0, 0.0], [1.0, 0.0]]


# ------------------------------------------------------------------ which engine runs


def test_the_reference_runs_only_when_named(monkeypatch):
    def refuse(*_):
        raise AssertionError("the (m, M) matrix was made")

    monkeypatch.setattr("xbm.engine.dense.reference", refuse)
    s = scene()
    for engine in ("auto", "streaming"):
        ContrastiveLoss(engine=engine)(s.anchors, s.labels, s.memory, ids=s.ids)
    with pytest.raises(AssertionError, match="was made"):
        ContrastiveLoss(engine="reference")(s.anchors, s.labels, s.memory, ids=s.ids)


def test_rows_are_differentiated_only_where_somebody_asks(monkeypatch):
    asked = []
    compare = streaming.compare

    def watch(*given, **named):
        asked.append(given[3:5])
        return compare(*given, **named)

    monkeypatch.setattr(streaming, "compare", watch)
    queue, backprop = scene(), scene(update="backprop")
    ContrastiveLoss()(queue.anchors, queue.labels, queue.memory, ids=queue.ids)
    ContrastiveLoss()(backprop.anchors, backprop.labels, backprop.memory, ids=backprop.ids)
    ContrastiveLoss()(backprop.anchors.detach(), backprop.labels, backprop.memory, ids=backprop.ids)
    with torch.no_grad():
        ContrastiveLoss()(backprop.anchors, backprop.labels, backprop.memory, ids=backprop.ids)
    assert asked == [(True, False), (True, True), (False, True), (False, False)]


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_contiguous_whatever_way_it_was_computed(way, monkeypatch):
    """The rest of a backward pass sums over it, and sums over another layout differ in their last bit."""
    set_way(monkeypatch, way)
    s = scene()
    loss = ContrastiveLoss(engine="streaming")(s.anchors, s.labels, s.memory, ids=s.ids)
    assert torch.autograd.grad(loss, s.anchors)[0].is_contiguous()
