"""The memory against plain-Python models: a deque for the queue, a dict for the keyed slots."""

import io
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from xbm import ContrastiveLoss, CrossBatchMemory, InputError
from xbm.distributed import ShardedMemory


def unit(m, dim, dtype=torch.float32):
    return F.normalize(torch.randn(m, dim, dtype=torch.float64), dim=1).to(dtype)


def saved_and_loaded(memory):
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    twin = CrossBatchMemory(memory.size, memory.dim, memory.update, dtype=memory.rows.dtype, momentum=memory.momentum)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


batches = st.lists(
    st.tuples(st.lists(st.booleans(), max_size=23), st.booleans()),  # a mask per row, and whether to save and load after it
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 17), plan=batches, masked=st.booleans())
def test_queue_holds_what_a_deque_holds(size, plan, masked):
    memory, model, written = CrossBatchMemory(size, 3), deque(maxlen=size), 0
    calls = 0
    for mask, reload in plan:
        v, ids = unit(len(mask), 3), torch.arange(written, written + len(mask))
        labels = ids % 5
        kept = mask if masked else [True] * len(mask)
        memory.enqueue(v, labels, ids, mask=torch.tensor(mask, dtype=torch.bool) if masked else None)
        calls += any(kept)
        model.extend((v[i], int(labels[i]), int(ids[i]), calls) for i in range(len(mask)) if kept[i])
        written += len(mask)
        if reload:
            memory = saved_and_loaded(memory)
        assert len(memory) == len(model)
        assert memory.is_full == (len(model) == size)
        assert memory.labels.tolist() == [row[1] for row in model]
        assert memory.ids.tolist() == [row[2] for row in model]
        assert memory.ages.tolist() == [calls - row[3] for row in model]
        assert torch.equal(memory.embeddings, torch.stack([row[0] for row in model]) if model else torch.zeros(0, 3))


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 9),
    plan=st.lists(st.tuples(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=12), st.booleans()), max_size=8),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    update=st.sampled_from(["moving_average", "backprop"]),
)
def test_keyed_slots_hold_what_a_dict_holds(size, plan, momentum, update):
    memory = CrossBatchMemory(size, 3, update, momentum=momentum, dtype=torch.float64)
    model, calls = {}, 0
    for rows, reload in plan:
        ids = torch.tensor([i % size for i, _ in rows], dtype=torch.int64)
        mask = torch.tensor([keep for _, keep in rows], dtype=torch.bool)
        v = unit(len(rows), 3, torch.float64)
        labels = torch.arange(len(rows)) + calls
        memory.enqueue(v, labels, ids, mask=mask)
        last = {int(i): n for n, i in enumerate(ids) if mask[n]}
        calls += bool(last)
        for i, n in last.items():
            old = model.get(i)
            row = v[n] if old is None else F.normalize(momentum * old[0] + (1 - momentum) * v[n], dim=0) if momentum else v[n]
            model[i] = (row, int(labels[n]), calls)
        if reload:
            memory = saved_and_loaded(memory)
        assert memory.ids.tolist() == sorted(model)
        assert memory.labels.tolist() == [model[i][1] for i in sorted(model)]
        assert memory.ages.tolist() == [calls - model[i][2] for i in sorted(model)]
        assert len(memory) == len(model) and memory.is_full == (len(model) == size)
        for got, i in zip(memory.embeddings, sorted(model)):
            assert torch.allclose(got, model[i][0], atol=1e-12, rtol=0)


# ------------------------------------------------------------------ mistakes that others shipped


@pytest.mark.parametrize("size", [10, 12])  # not a multiple of the batch, and a multiple
def test_no_batch_is_lost_at_the_end_of_a_lap(size):
    memory = CrossBatchMemory(size, 3)
    for start in range(0, 40, 4):
        memory.enqueue(unit(4, 3), torch.arange(start, start + 4))
    assert memory.labels.tolist() == list(range(40 - size, 40))


def test_label_zero_fills_the_memory_like_any_other():
    memory = CrossBatchMemory(4, 3)
    memory.enqueue(unit(4, 3), torch.zeros(4, dtype=torch.int64))
    assert memory.is_full and len(memory) == 4


def test_an_empty_enqueue_changes_nothing():
    memory = CrossBatchMemory(4, 3)
    before = {k: b.clone() for k, b in memory.state_dict().items()}
    memory.enqueue(unit(0, 3), torch.zeros(0, dtype=torch.int64))
    memory.enqueue(unit(2, 3), torch.zeros(2, dtype=torch.int64), mask=torch.zeros(2, dtype=torch.bool))
    assert all(torch.equal(before[k], b) for k, b in memory.state_dict().items())
    assert not memory.is_full


def test_rows_never_written_are_never_compared_with():
    v, labels, ids = unit(2, 3), torch.tensor([0, 1]), torch.tensor([0, 1])
    for update in ("queue", "moving_average"):
        memory = CrossBatchMemory(50, 3, update)
        memory.enqueue(v, labels, ids)
        # label -1 is what unwritten rows hold: as an anchor's label it must not make positives of them
        _, stats = ContrastiveLoss(margin=-2.0)(v, torch.tensor([-1, -1]), memory, ids=torch.tensor([7, 8]), return_stats=True)
        assert stats.valid_positives.tolist() == [0, 0]
        assert stats.valid_negatives.tolist() == [2, 2]


def test_resume_continues_the_queue_where_it_stopped():
    memory = CrossBatchMemory(7, 3)
    for start in (0, 5):
        memory.enqueue(unit(5, 3), torch.arange(start, start + 5))
    twin = saved_and_loaded(memory)
    v = unit(3, 3)
    for each in (memory, twin):
        each.enqueue(v, torch.tensor([100, 101, 102]))
    assert twin.labels.tolist() == memory.labels.tolist() == [6, 7, 8, 9, 100, 101, 102]
    assert torch.equal(twin.rows, memory.rows) and int(twin.pointer) == int(memory.pointer)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given_", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", ["queue", "moving_average"])
def test_embeddings_of_any_type_go_into_a_bank_of_any_type_which_keeps_its_own(stored, given_, update):
    memory = CrossBatchMemory(5, 16, update, dtype=stored)
    v = unit(3, 16, given_)
    for _ in range(2):
        memory.enqueue(v, torch.arange(3), torch.arange(3))
    assert memory.rows.dtype == stored
    assert torch.allclose(memory.embeddings[-3:].double(), v.double(), atol=1e-2)


# ------------------------------------------------------------------ the keyed updates


def test_first_sight_stores_the_embedding_as_it_is():
    memory = CrossBatchMemory(3, 4, "moving_average", momentum=0.9)
    v = unit(1, 4)
    memory.enqueue(v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(memory.embeddings, v)


@pytest.mark.parametrize("alpha", [0.1, -0.1])
def test_backprop_step_descends_and_a_negative_alpha_ascends(alpha):
    memory = CrossBatchMemory(6, 5, "backprop", alpha=alpha, dtype=torch.float64)
    v, labels, ids = unit(6, 5, torch.float64), torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6)
    memory.enqueue(v, labels, ids)
    rows = memory.rows.detach().clone().requires_grad_()
    anchors, other = unit(3, 5, torch.float64), torch.tensor([0, 1, 2])
    loss_fn = ContrastiveLoss(margin=-0.3)
    S = anchors @ rows.T
    same = other[:, None] == labels
    expected = loss_fn.dense(S, same, ~same).sum() / 3
    expected.backward()
    before = memory.rows.detach().clone()
    loss = loss_fn(anchors, other, memory, ids=torch.tensor([90, 91, 92]))
    assert torch.equal(memory.rows, before), "a loss call never changes the bank"
    loss.backward()
    assert torch.equal(memory.rows, before)
    memory.step()
    moved = F.normalize(before - alpha * rows.grad, dim=1)
    assert torch.allclose(memory.rows, moved, atol=1e-12, rtol=0)
    again = memory.rows.clone()
    memory.step()
    assert torch.equal(memory.rows, again), "a gradient is applied once"


def test_backprop_leaves_rows_without_gradient_bit_for_bit():
    memory = CrossBatchMemory(4, 8, "backprop", alpha=0.5)
    memory.enqueue(unit(3, 8), torch.tensor([0, 1, 2]), torch.arange(3))
    anchors = unit(1, 8)
    ContrastiveLoss(margin=2.0)(anchors, torch.tensor([0]), memory, ids=torch.tensor([9])).backward()
    before = memory.rows.detach().clone()
    memory.step()
    assert not torch.equal(memory.rows[0], before[0])
    assert torch.equal(memory.rows[1:], before[1:])


def test_backprop_with_momentum_averages_what_enqueue_substitutes():
    memory = CrossBatchMemory(2, 4, "backprop", momentum=0.9, alpha=0.2, dtype=torch.float64)
    first, second = unit(1, 4, torch.float64), unit(1, 4, torch.float64)
    for v in (first, second):
        memory.enqueue(v, torch.tensor([0]), torch.tensor([1]))
    assert torch.allclose(memory.embeddings, F.normalize(0.9 * first + 0.1 * second))


def test_backprop_rows_stay_a_leaf_when_the_memory_moves():
    memory = CrossBatchMemory(3, 4, "backprop").to(torch.float64)
    assert memory.rows.is_leaf and memory.rows.requires_grad and memory.rows.dtype == torch.float64


# ------------------------------------------------------------------ filling from images


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return F.normalize(self.norm(x), dim=1)


def test_fill_embeds_in_train_mode_until_full_and_restores_the_statistics():
    net, memory = Net(), CrossBatchMemory(10, 4)
    net.eval()
    memory.enqueue(unit(3, 4), torch.tensor([77, 77, 77]))
    images = torch.randn(24, 4) * 3 + 1
    loader = [(images[i : i + 6], torch.arange(i, i + 6), torch.arange(i, i + 6)) for i in range(0, 24, 6)]
    before = {name: b.clone() for name, b in net.state_dict().items()}
    memory.fill(net, loader)
    assert memory.ids.tolist() == list(range(2, 12)), "stops once full: the last rows of two batches"
    assert not net.training
    assert all(torch.equal(before[name], b) for name, b in net.state_dict().items())
    net.train()
    assert torch.allclose(memory.embeddings[-6:], net(images[6:12]).detach(), atol=1e-6)
    assert not memory.rows.requires_grad


def test_fill_with_a_short_loader_takes_what_there_is():
    memory = CrossBatchMemory(10, 4)
    memory.fill(Net(), [(torch.randn(3, 4), torch.arange(3), torch.arange(3))])
    assert len(memory) == 3


# ------------------------------------------------------------------ bad input


def good():
    return {"embeddings": unit(3, 4), "labels": torch.arange(3), "ids": torch.arange(3)}


BAD = {
    "dimension": ({"embeddings": unit(3, 5)}, "expected embeddings of dimension 4, got 5"),
    "integer embeddings": ({"embeddings": torch.ones(3, 4, dtype=torch.int64)}, "pass float embeddings"),
    "one vector": ({"embeddings": unit(3, 4)[0]}, "one embedding per row"),
    "length": ({"embeddings": unit(3, 4) * 2}, "row 0 of the embeddings has length 2, not 1"),
    "NaN": ({"embeddings": torch.full((3, 4), torch.nan)}, "NaN or infinity"),
    "zero row": ({"embeddings": torch.zeros(3, 4)}, "length 0, not 1"),
    "too few labels": ({"labels": torch.arange(2)}, "3 embeddings but labels of shape"),
    "float labels": ({"labels": torch.ones(3)}, "labels are torch.float32: pass an integer tensor"),
    "list of ids": ({"ids": [1, 2, 3]}, "ids are list: pass an integer tensor"),
    "id too large": ({"ids": torch.tensor([0, 1, 9])}, "row 2 has the id 9: .*0 ≤ id < 9"),
    "negative id": ({"ids": torch.tensor([0, -1, 2])}, "row 1 has the id -1"),
    "no ids": ({"ids": None}, "pass ids to enqueue"),
    "mask": ({"mask": torch.ones(2, dtype=torch.bool)}, "mask must be 3 booleans"),
    "device": ({"labels": torch.arange(3, device="meta")}, "labels are on meta, the embeddings on cpu: move them"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence_and_changes_nothing(case):
    change, message = BAD[case]
    memory = CrossBatchMemory(9, 4, "moving_average")
    memory.enqueue(**good())
    before = {name: b.clone() for name, b in memory.state_dict().items()}
    with pytest.raises(InputError, match=message) as error:
        memory.enqueue(**{**good(), **change})
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[name], b) for name, b in memory.state_dict().items())


def test_a_masked_out_row_may_be_anything():
    memory = CrossBatchMemory(9, 4, "moving_average")
    v = torch.cat([unit(2, 4), torch.full((1, 4), torch.nan)])
    memory.enqueue(v, torch.arange(3), torch.tensor([0, 1, -5]), mask=torch.tensor([True, True, False]))
    assert memory.ids.tolist() == [0, 1]


def test_slight_rounding_is_not_bad_input():
    memory = CrossBatchMemory(9, 64)
    memory.enqueue(unit(3, 64).bfloat16(), torch.arange(3))
    memory.enqueue(unit(3, 64) * (1 + 1e-5), torch.arange(3))
    assert len(memory) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"update": "que"}, "unknown update 'que': did you mean 'queue'"),
        ({"size": 0}, "must be positive integers"),
        ({"dtype": torch.int8}, "dtype must be float64.*got torch.int8"),
        ({"momentum": 1.0}, "0 ≤ m < 1"),
    ],
)
def test_bad_construction_is_told_in_one_sentence(arguments, message):
    with pytest.raises(InputError, match=message):
        CrossBatchMemory(**{"size": 3, "dim": 4, **arguments})


def test_a_batch_larger_than_the_memory_counts_as_one_call():
    memory = CrossBatchMemory(3, 4)
    memory.enqueue(unit(8, 4), torch.arange(8))
    assert memory.labels.tolist() == [5, 6, 7] and memory.ages.tolist() == [0, 0, 0]


def test_anchors_of_a_batch_larger_than_the_memory_meet_what_stayed_of_it():
    """Without ids: the first rows did not stay, so nothing in the bank is theirs; the others leave out their own."""
    memory, v, labels = CrossBatchMemory(5, 4), unit(8, 4), torch.zeros(8, dtype=torch.int64)
    memory.enqueue(v, labels)
    _, stats = ContrastiveLoss()(v, labels, memory, return_stats=True)
    assert stats.valid_positives.tolist() == [5, 5, 5, 4, 4, 4, 4, 4]


# ------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("update", ["queue", "moving_average", "backprop"])
def test_a_step_compiles_without_graph_breaks(update):
    loss_fn = ContrastiveLoss(margin=-0.5)
    weight = torch.randn(4, 6)

    def step(memory, x, labels, ids):
        v = F.normalize(x @ weight, dim=1)
        memory.enqueue(v.detach(), labels, ids)
        return loss_fn(v, labels, memory, ids=ids)

    plain, compiled = (CrossBatchMemory(11, 6, update) for _ in range(2))
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    for start in range(0, 20, 4):
        x, ids = torch.randn(4, 4, requires_grad=True), torch.arange(start, start + 4) % 11
        twin = x.detach().clone().requires_grad_()
        labels = ids % 3
        expected, got = step(plain, x, labels, ids), fast(compiled, twin, labels, ids)
        expected.backward()
        got.backward()
        plain.step()
        compiled.step()
        assert torch.allclose(expected, got) and torch.allclose(x.grad, twin.grad)
        assert torch.allclose(plain.rows, compiled.rows) and plain.ids.tolist() == compiled.ids.tolist()


def test_a_device_that_does_not_exist_is_not_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="bogus"):
        CrossBatchMemory(10, 8, device="bogus")


def test_a_state_of_another_size_is_refused_with_both_sizes():
    memory, other = CrossBatchMemory(3, 2), CrossBatchMemory(4, 2)
    other.enqueue(torch.eye(2), torch.arange(2))
    for holder, state in (
        (memory, other.state_dict()),
        (torch.nn.ModuleList([memory]), {f"0.{k}": v for k, v in other.state_dict().items()}),
    ):
        with pytest.raises(InputError, match=r"of shape \(4, 2\), this one has rows of shape \(3, 2\)"):
            holder.load_state_dict(state)
    assert len(memory) == 0


@pytest.mark.parametrize("update", ["queue", "moving_average", "backprop"])
def test_the_state_of_another_update_is_refused(update):
    """A queue's slots are not keyed: an anchor would meet its own copy under another key."""
    other = CrossBatchMemory(5, 3, "moving_average" if update == "queue" else "queue")
    memory = CrossBatchMemory(5, 3, update)
    memory.load_state_dict(other.state_dict())  # empty: the same for all
    other.enqueue(F.normalize(torch.randn(3, 3)), torch.arange(3), torch.arange(3))
    before = {name: x.clone() for name, x in memory.state_dict().items()}
    for load, state in (
        (memory.load_state_dict, other.state_dict()),
        (torch.nn.ModuleList([memory]).load_state_dict, torch.nn.ModuleList([other]).state_dict()),
        (ShardedMemory(5, 3, update).load_state_dict, other.state_dict()),
    ):
        with pytest.raises(InputError, match="create the memory with the same update"):
            load(state)
    assert all(torch.equal(x, before[name]) for name, x in memory.state_dict().items())


@pytest.mark.parametrize("options", [{"alpha": float("nan")}, {"alpha": float("inf")}, {"momentum": float("nan")}])
def test_options_that_are_not_finite_are_refused(options):
    with pytest.raises(InputError, match="finite"):
        CrossBatchMemory(5, 3, "backprop", **options)


@pytest.mark.parametrize("make", [CrossBatchMemory, ShardedMemory])
@pytest.mark.parametrize("update", ["queue", "moving_average", "backprop"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pointer", 999),
        ("pointer", 5),
        ("pointer", -1),
        ("count", -5),
        ("count", 6),
        ("clock", -1),
        ("unsound", -2),
        ("rows", float("nan")),
    ],
)
def test_a_state_that_no_memory_has_is_refused(make, update, name, value):
    source = CrossBatchMemory(5, 3, update)
    source.enqueue(torch.eye(3), torch.arange(3), ids=torch.arange(3))
    state = source.state_dict()
    make(5, 3, update).load_state_dict(state)
    damaged = {**state, name: torch.full_like(state[name], value)}
    memory = make(5, 3, update)
    with pytest.raises(InputError, match="it is damaged"):
        memory.load_state_dict(damaged)
    assert len(memory) == 0


def test_rows_that_were_never_written_may_have_any_content():
    source, memory = CrossBatchMemory(5, 3), CrossBatchMemory(5, 3)
    source.enqueue(torch.eye(3), torch.arange(3))
    source.rows[3:] = torch.nan
    memory.load_state_dict(source.state_dict())
    assert len(memory) == 3
