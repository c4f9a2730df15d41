"""Live rows on the other side: against dense float64 autograd over the concatenated rows, for every loss and engine."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from xbm import CrossBatchMemory, InputError, SupConLoss
from xbm.engine import streaming
from xbm.losses import LOSSES
from xbm.losses.pair import PairLoss

NAMES = sorted(LOSSES)
WAYS = [{}, {"SMALL": -1}, {"SMALL": -1, "MOST_LISTED": -1, "TILE": 5 * 9}]  # at once, listed, masked in small tiles


@pytest.fixture(params=range(len(WAYS)))
def way(request, monkeypatch):
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(streaming, name, value)


@pytest.fixture(autouse=True)
def compile_afresh():
    torch._dynamo.reset()  # each case compiles the same code for another loss


def unit(n, D=9, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(n, D, dtype=dtype, generator=torch.Generator().manual_seed(seed)))


def scene(m=7, r=7, M=23, update="queue", dtype=torch.float64, D=9):
    """m anchors, r references and M rows of three classes; ids from 100 on for the rows of a queue."""
    anchors, references = unit(m, D, 1, dtype).requires_grad_(), unit(r, D, 2, dtype).requires_grad_()
    memory = CrossBatchMemory(M + 8, D, update, dtype=dtype)
    ids = torch.arange(M) + (100 if update == "queue" else 8)
    memory.enqueue(unit(M, D, 3, dtype), torch.arange(M) % 3, ids)
    return anchors, torch.arange(m) % 3, references, torch.arange(r) % 3, memory


def plainly(loss_fn: PairLoss, anchors, labels, rows, row_labels, excluded=None):
    """The plain formula on the whole matrix."""
    S = anchors @ rows.T
    same, counts = labels[:, None] == row_labels, torch.ones(S.shape, dtype=torch.bool)
    if excluded is not None:
        counts &= ~excluded
    return loss_fn.dense(S, same & counts, ~same & counts).sum() / len(anchors)


def assert_same(found, expected, leaves, tolerance=1e-10):
    assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)
    a, b = (torch.autograd.grad(x, leaves, allow_unused=True, retain_graph=True) for x in (found, expected))
    for mine, theirs in zip(a, b):
        if theirs is None or mine is None:
            assert mine is None or not mine.any()
            assert theirs is None or not theirs.any()
        else:
            assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
@pytest.mark.parametrize("name", NAMES)
def test_references_alone_equal_the_plain_formula(name, reduction, engine, way):
    loss_fn = LOSSES[name](reduction=reduction, engine=engine)
    anchors, labels, references, row_labels, _ = scene(r=11)
    found = loss_fn(anchors, labels, references=references, reference_labels=row_labels)
    assert_same(found, plainly(loss_fn, anchors, labels, references, row_labels), (anchors, references))


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("update", ["queue", "moving_average", "backprop"])
@pytest.mark.parametrize("name", NAMES)
def test_references_and_memory_are_one_bank(name, update, engine, way):
    loss_fn = LOSSES[name](engine=engine)
    anchors, labels, references, row_labels, memory = scene(r=5, update=update)
    ids = torch.arange(5)
    found = loss_fn(
        anchors, labels, memory, ids=torch.arange(7), references=references, reference_labels=row_labels, reference_ids=ids
    )
    filled = memory.stamps >= 0
    rows, classes = torch.cat([references, memory.rows[filled]]), torch.cat([row_labels, memory.row_labels[filled]])
    leaves = (anchors, references, *([memory.rows] if update == "backprop" else []))
    assert_same(found, plainly(loss_fn, anchors, labels, rows, classes), leaves)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_without_memory_sup_con_is_cross_entropy(engine, way):
    q, d, labels = unit(6, seed=1).requires_grad_(), unit(6, seed=2).requires_grad_(), torch.arange(6)
    found = SupConLoss(temperature=0.07, engine=engine)(q, labels, references=d)
    assert_same(found, F.cross_entropy(q @ d.T / 0.07, labels), (q, d))


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("named", [True, False])
def test_a_batch_counts_once_whether_it_is_enqueued_before_or_after(named, engine):
    loss_fn, (q, _, d, _, _) = SupConLoss(engine=engine), scene()
    labels = torch.arange(7) + 50
    ids = labels if named else None
    memory = CrossBatchMemory(40, 9, dtype=torch.float64)
    memory.enqueue(unit(9, seed=8), torch.arange(9), torch.arange(9) if named else None)
    after = loss_fn(q, labels, memory, references=d, ids=ids)
    memory.enqueue(d.detach(), labels, ids)
    before = loss_fn(q, labels, memory, references=d, ids=ids)
    assert_same(before, after, (q, d))
    rows = torch.cat([d, memory.embeddings[:9]])
    assert_same(before, plainly(loss_fn, q, labels, rows, torch.cat([labels, memory.labels[:9]])), (q, d))


def test_without_ids_rows_are_live_only_if_the_latest_enqueue_wrote_the_references():
    loss_fn, (q, labels, d, _, _) = SupConLoss(), scene()
    all_but_one = torch.cat([d[:3], unit(1, seed=8), d[4:]])
    for writes in (
        [(d[:4], labels[:4]), (d[4:], labels[4:])], [(d, labels + 1)], [(d.roll(1, 0), labels)], [(all_but_one, labels)],
    ):  # fmt: skip
        memory = CrossBatchMemory(40, 9, dtype=torch.float64)
        for rows, classes in writes:
            memory.enqueue(rows.detach(), classes)
        found = loss_fn(q, labels, memory, references=d)
        rows, classes = torch.cat([d, memory.embeddings]), torch.cat([labels, memory.labels])
        assert_same(found, plainly(loss_fn, q, labels, rows, classes), (q, d))


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_without_ids_a_memory_smaller_than_the_references_holds_nothing_but_them(engine):
    loss_fn, (q, labels, d, _, _) = SupConLoss(engine=engine), scene()
    memory = CrossBatchMemory(5, 9, dtype=torch.float64)
    memory.enqueue(d.detach(), labels)
    assert_same(loss_fn(q, labels, memory, references=d), plainly(loss_fn, q, labels, d, labels), (q, d))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_property_duplicates_and_exclusion(data):
    """Repeated ids, an empty memory, no references, an overflowing queue: against masks made by plain loops."""
    m, r, M, size = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (0, 5), (0, 9), (1, 12)))
    few = st.integers(0, 4)
    labels, row_labels = (torch.tensor(data.draw(st.lists(few, min_size=n, max_size=n)), dtype=torch.long) for n in (m, r))
    ids, row_ids = (torch.tensor(data.draw(st.lists(few, min_size=n, max_size=n)), dtype=torch.long) for n in (m, r))
    memory = CrossBatchMemory(size, 9, dtype=torch.float64)
    past = torch.tensor(data.draw(st.lists(few, min_size=M, max_size=M)), dtype=torch.long)
    memory.enqueue(unit(M, seed=3), past % 3, past)
    exclude = data.draw(st.sampled_from([None, "none", "instance", "copy"]))
    anchors, references = unit(m, seed=1).requires_grad_(), unit(r, seed=2).requires_grad_()
    name = data.draw(st.sampled_from(NAMES))

    rows = [("live", k, int(row_labels[k]), int(row_ids[k])) for k in range(r)]
    old = [(e, int(a), int(b)) for e, a, b in zip(range(len(memory)), memory.labels, memory.ids)]  # oldest first
    rows += [("old", e, a, b) for e, a, b in old if b not in row_ids.tolist()]
    excluded = torch.zeros(m, len(rows), dtype=torch.bool)
    for i in range(m):
        copies = [j for j, row in enumerate(rows) if row[3] == int(ids[i])]
        live = [j for j in copies if rows[j][0] == "live"]
        if exclude == "instance":
            excluded[i, copies] = True
        elif exclude == "copy" and copies:
            excluded[i, (live or copies)[-1]] = True
    bank = torch.stack([references[k] if kind == "live" else memory.embeddings[k] for kind, k, *_ in rows]) if rows else None
    for engine in ("reference", "streaming"):
        loss_fn = LOSSES[name](engine=engine)
        found = loss_fn(
            anchors, labels, memory, ids=ids, references=references, reference_labels=row_labels, reference_ids=row_ids,
            exclude=exclude,
        )  # fmt: skip
        if bank is None:
            assert found.item() == 0
            continue
        classes = torch.tensor([row[2] for row in rows])
        assert_same(found, plainly(loss_fn, anchors, labels, bank, classes, excluded), (anchors, references))


@pytest.mark.parametrize("name", NAMES)
def test_with_gradient_returns_both_gradients(name, way):
    for memory in (None, scene()[-1]):
        for engine in ("reference", "streaming"):
            loss_fn, (q, labels, d, _, _) = LOSSES[name](engine=engine), scene()
            value, of_anchors, of_references = loss_fn.with_gradient(q, labels, memory, references=d)
            expected = loss_fn(q, labels, memory, references=d)
            assert torch.allclose(value, expected)
            for mine, theirs in zip((of_anchors, of_references), torch.autograd.grad(expected, (q, d))):
                assert torch.allclose(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_count_references(name):
    found = []
    for engine in ("reference", "streaming"):
        q, labels, d, _, memory = scene()
        _, stats = LOSSES[name](engine=engine)(q, labels, memory, references=d, return_stats=True)
        found.append(stats.read())
    for key in found[0]:
        assert torch.allclose(found[0][key].double(), found[1][key].double())
    q, labels, d, _, memory = scene()
    S = q @ torch.cat([d, memory.embeddings]).T
    other = labels[:, None] != torch.cat([labels, memory.labels])
    assert torch.allclose(found[1]["hardest_negative"], S.where(other, -torch.inf).amax(1))


@pytest.mark.parametrize("with_memory", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_call_gives_the_same(name, with_memory):
    q, labels, d, _, memory = scene()
    loss_fn = LOSSES[name]()
    step = torch.compile(
        lambda q, d: loss_fn(q, labels, memory if with_memory else None, references=d), fullgraph=True, backend="aot_eager"
    )
    assert_same(step(q, d), loss_fn(q, labels, memory if with_memory else None, references=d), (q, d))


def test_under_autocast_half_references_meet_a_wide_memory():
    q, labels, d, _, memory = scene(dtype=torch.float32)
    half = d.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = SupConLoss()(q, labels, memory, references=half)
    wide = SupConLoss()(q, labels, memory, references=half.float())
    assert torch.allclose(loss, wide)
    assert torch.autograd.grad(loss, half)[0].dtype == torch.bfloat16


def test_only_references_may_need_a_gradient():
    q, labels, d, _, memory = scene()
    (gradient,) = torch.autograd.grad(SupConLoss()(q.detach(), labels, memory, references=d), d)
    (expected,) = torch.autograd.grad(SupConLoss(engine="reference")(q, labels, memory, references=d), d)
    assert torch.allclose(gradient, expected)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("name", NAMES)
def test_no_references_are_an_empty_bank(name, engine):
    q, d, none = unit(3).requires_grad_(), unit(0).requires_grad_(), torch.arange(0)
    loss_fn = LOSSES[name](engine=engine)
    loss, stats = loss_fn(q, torch.arange(3), references=d, reference_labels=none, return_stats=True)
    expected = loss_fn(q, torch.arange(3), CrossBatchMemory(4, 9, dtype=torch.float64))
    assert torch.equal(loss, expected) and stats.read()["valid_negatives"].tolist() == [0, 0, 0]
    if loss.requires_grad:
        loss.backward()
    assert q.grad is None or not q.grad.any()


def test_no_anchors_still_reach_both_towers():
    q, d = unit(0).requires_grad_(), unit(0).requires_grad_()
    SupConLoss()(q, torch.arange(0), references=d).backward()
    assert q.grad is not None and d.grad is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"references": unit(4)}, "pass reference_labels"),
        ({"references": unit(4), "reference_labels": torch.arange(4), "ids": torch.arange(7)}, "pass reference_ids"),
        ({"reference_labels": torch.arange(7)}, "pass references too"),
        ({"references": unit(7, D=4)}, "9 columns, the references 4"),
        ({"references": unit(7), "exclude": "instance"}, "pass ids"),
        ({"references": unit(7), "exclude": "copy"}, "pass ids"),
        ({"references": 2 * unit(7)}, "the references has length 2"),
        ({"references": unit(7), "exclude": "own"}, "exclude"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, says):
    q, labels, *_ = scene()
    with pytest.raises(InputError, match=says):
        SupConLoss()(q, labels, **arguments)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_with_ids_a_memory_must_know_its_rows_by_id_too(engine):
    q, labels, d, *_ = scene()
    memory = CrossBatchMemory(20, 9, dtype=torch.float64)
    memory.enqueue(d.detach(), labels)
    for named in ({"ids": torch.arange(7)}, {"reference_ids": torch.arange(7)}):
        with pytest.raises(InputError, match="rows without ids"):
            SupConLoss(engine=engine)(q, labels, memory, references=d, **named)


def test_a_keyed_memory_needs_ids_to_find_duplicates():
    q, labels, d, _, memory = scene(update="moving_average")
    with pytest.raises(InputError, match="pass ids"):
        SupConLoss()(q, labels, memory, references=d)


# ------------------------------------------------------------------ nothing excluded, without references


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("name", NAMES)
def test_exclude_none_compares_queries_with_a_memory_of_documents(name, engine):
    q, labels, _, _, memory = scene()
    loss_fn = LOSSES[name](engine=engine, exclude="none")
    assert_same(loss_fn(q, labels, memory), plainly(loss_fn, q, labels, memory.embeddings, memory.labels), (q,))
    assert_same(loss_fn(q, labels), plainly(loss_fn, q, labels, q, labels), (q,))


# ------------------------------------------------------------------ a learned temperature


@pytest.mark.parametrize("against", ["batch", "memory", "references", "both"])
@pytest.mark.parametrize("engine", ["reference", "streaming", "compiled"])
def test_the_gradient_of_a_learned_temperature_is_autograds(engine, against, way):
    q, labels, d, _, memory = scene()
    loss_fn = SupConLoss(0.3, learn_temperature=True, engine="streaming" if engine == "compiled" else engine).double()
    log_t = loss_fn.log_temperature
    with torch.no_grad():
        log_t.fill_(torch.tensor(0.3, dtype=torch.float64).log())
    given = {"references": d} if against in ("references", "both") else {}
    bank = memory if against in ("memory", "both") else None
    if bank is not None and not given:
        given = {"exclude": "none"}

    def call(q):
        return loss_fn(q, labels, bank, **given)

    found = (torch.compile(call, backend="aot_eager", fullgraph=True) if engine == "compiled" else call)(q)
    parts = [(d, labels)] if "references" in given else [] if bank is not None else [(q, labels)]
    parts += [(bank.embeddings, bank.labels)] if bank is not None else []
    rows, classes = (torch.cat(column) for column in zip(*parts))
    S, same = q @ rows.T / log_t.exp(), labels[:, None] == classes
    counts = ~torch.eye(7, dtype=torch.bool) if against == "batch" else torch.ones_like(same)
    positive = same & counts
    lse = S.where(counts, -torch.inf).logsumexp(1)
    expected = (lse - (S * positive).sum(1) / positive.sum(1)).mean()
    assert_same(found, expected, (q, log_t, d) if "references" in given else (q, log_t))


def test_a_learned_temperature_is_trained_read_saved_and_bounded():
    loss_fn = SupConLoss(0.02, learn_temperature=True)
    assert [name for name, _ in loss_fn.named_parameters()] == ["log_temperature"]
    assert float(loss_fn.temperature) == pytest.approx(0.02)
    optimizer = torch.optim.SGD(loss_fn.parameters(), lr=1.0)
    v, labels = unit(6, seed=4, dtype=torch.float32), torch.arange(6) % 2
    for _ in range(30):  # pull τ down: the loss's own gradient may point either way
        optimizer.zero_grad()
        (loss_fn(v, labels) * 0 + loss_fn.bounded(loss_fn.log_temperature)).backward()
        optimizer.step()
    assert float(loss_fn.temperature) == pytest.approx(0.01)
    assert float(loss_fn.log_temperature.detach()) > -7  # it did not drift away
    optimizer.zero_grad()
    (-loss_fn.bounded(loss_fn.log_temperature)).backward()
    optimizer.step()
    assert float(loss_fn.temperature) > 0.01 or float(loss_fn.log_temperature.grad) < 0  # and finds back
    other = SupConLoss(learn_temperature=True)
    other.load_state_dict(loss_fn.state_dict())
    assert torch.equal(other.temperature, loss_fn.temperature)
    other.temperature = 0.5
    assert float(other.temperature) == pytest.approx(0.5)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_below_its_bound_a_learned_temperature_counts_as_the_bound(engine):
    q, labels, d, _, memory = scene()
    loss_fn = SupConLoss(0.02, learn_temperature=True, engine=engine)
    with torch.no_grad():
        loss_fn.log_temperature.fill_(-6.0)
    expected = SupConLoss(0.01, engine=engine)(q, labels, memory, references=d)
    assert torch.allclose(loss_fn(q, labels, memory, references=d), expected)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_a_learned_temperature_that_diverged_shows_in_the_loss(engine, way):
    q, labels, d, _, memory = scene()
    loss_fn = SupConLoss(learn_temperature=True, engine=engine)
    with torch.no_grad():
        loss_fn.log_temperature.fill_(torch.nan)
    assert loss_fn(q, labels, memory, references=d).isnan()


def test_a_learned_temperature_that_is_too_small_or_has_no_way_to_its_gradient_is_refused():
    with pytest.raises(InputError, match=r"at least 0.01"):
        SupConLoss(0.001, learn_temperature=True)
    with pytest.raises(InputError, match=r"backward\(\)"):
        SupConLoss(learn_temperature=True).with_gradient(unit(3), torch.arange(3))
    assert not list(SupConLoss().parameters())


# ------------------------------------------------------------------ nothing to learn from


def warned(loss_fn, calls, *given, **named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            loss_fn(*given, **named)
    assert all(w.filename == __file__ for w in caught)  # where the loss is called
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_without_positives_warns_once_and_says_why(name, engine):
    q, d, ids = unit(5, seed=1), unit(5, seed=2), torch.arange(5)
    memory = CrossBatchMemory(20, 9, dtype=torch.float64)
    memory.enqueue(d, ids, ids)
    shared = LOSSES[name](engine=engine)
    assert warned(shared, 7, q, ids, memory, ids=ids) == []
    (message,) = warned(shared, 20, q, ids, memory, ids=ids)
    assert 'exclude="none"' in message
    (message,) = warned(LOSSES[name](engine=engine), 20, q, ids)
    assert "labels that repeat" in message
    (message,) = warned(LOSSES[name](engine=engine), 20, q, ids + 5, memory, exclude="none")
    assert "labels that repeat" in message


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_positives_give_no_warning(engine):
    q, d, labels = unit(5, seed=1), unit(5, seed=2), torch.arange(5)
    assert warned(SupConLoss(engine=engine), 20, q, labels, references=d) == []
    empty = CrossBatchMemory(9, 9, dtype=torch.float64)
    assert warned(SupConLoss(engine=engine), 20, q, labels, empty, references=d) == []
    sometimes = SupConLoss(engine=engine)
    for _ in range(5):
        assert warned(sometimes, 7, q, labels) == []
        assert warned(sometimes, 1, q, labels // 2) == []


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_a_memory_that_nobody_fills_is_named(engine):
    q, labels, memory = unit(6, seed=1), torch.arange(6) // 2, CrossBatchMemory(9, 9, dtype=torch.float64)
    loss_fn = SupConLoss(engine=engine)
    assert warned(loss_fn, 7, q, labels, memory) == []
    (message,) = warned(loss_fn, 20, q, labels, memory)
    assert "the memory is empty" in message and "memory.enqueue" in message
    late = SupConLoss(engine=engine)
    assert warned(late, 1, q, labels, memory, ids=labels) == []  # the first batch is enqueued after its loss
    memory.enqueue(q, labels, torch.arange(6))
    assert warned(late, 20, q, labels, memory, ids=torch.arange(6)) == []


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_with_gradient_warns_too(engine):
    q, labels = unit(5, seed=1), torch.arange(5)
    (message,) = warned(SupConLoss(engine=engine).with_gradient, 20, q, labels)
    assert "labels that repeat" in message
    mixed = SupConLoss(engine=engine)
    for call, calls, y in ((mixed, 7, labels), (mixed.with_gradient, 1, labels // 2), (mixed, 7, labels)):
        assert warned(call, calls, q, y) == []


def test_the_count_is_not_saved_or_copied():
    loss_fn, (q, labels) = SupConLoss(), (unit(5, seed=1), torch.arange(5))
    warned(loss_fn, 7, q, labels)
    assert warned(copy.deepcopy(loss_fn), 7, q, labels) == [] and loss_fn.state_dict() == {}
    assert len(warned(pickle.loads(pickle.dumps(loss_fn)), 8, q, labels)) == 1
