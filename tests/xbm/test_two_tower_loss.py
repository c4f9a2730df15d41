import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.worlds import on_ranks
from xbm import InputError, MomentumEncoder, SupConLoss, TwoTowerLoss
from xbm.losses import LOSSES, MetricLearningLoss
from xbm.two_tower_loss import NO_LABEL


def towers(m=5, k=0, D=7):
    draw = torch.Generator().manual_seed(k)
    return tuple(F.normalize(torch.randn(m, D, dtype=torch.float64, generator=draw)).requires_grad_() for _ in range(2))


def new(size=40, loss=None, **options):
    return TwoTowerLoss(loss or SupConLoss(0.2), size, 7, dtype=torch.float64, **options)


def plainly(loss_fn, anchors, labels, rows, row_labels):
    same = labels[:, None] == row_labels
    return loss_fn.dense(anchors @ rows.T, same, ~same).mean()


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_it_is_the_mean_of_both_directions_over_batch_and_past(name, engine):
    loss_fn = LOSSES[name](engine=engine)
    criterion, past = new(loss=loss_fn), []
    for k in range(4):
        q, d = towers(k=k)
        found = criterion(q, d)
        numbers = torch.arange(5 * k, 5 * k + 5)
        old = [torch.cat(x) for x in zip(*past)] if past else [q[:0], d[:0], numbers[:0]]
        labels = torch.cat([numbers, old[2]])
        rows_d, rows_q = torch.cat([d.detach(), old[1]]), torch.cat([q.detach(), old[0]])
        expected = (plainly(loss_fn, q, numbers, rows_d, labels) + plainly(loss_fn, d, numbers, rows_q, labels)) / 2
        assert torch.allclose(found, expected, atol=1e-10)
        as_rows = (plainly(loss_fn, q.detach(), numbers, d, numbers) + plainly(loss_fn, d.detach(), numbers, q, numbers)) / 2
        for mine, theirs in zip(torch.autograd.grad(found, (q, d)), torch.autograd.grad(expected + as_rows, (q, d))):
            assert torch.allclose(mine, theirs, atol=1e-10)
        past.append((q.detach(), d.detach(), numbers))
    assert int(criterion.pairs) == 20 and len(criterion.queries) == len(criterion.documents) == 20


def test_a_learned_temperature_gets_the_gradient_of_the_whole_loss():
    criterion = new(loss=SupConLoss(0.2, learn_temperature=True).double())
    criterion(*towers())
    loss = criterion(*towers(k=1))
    (found,) = torch.autograd.grad(loss, [criterion.loss.log_temperature])
    values = []
    for step in (-1e-6, 1e-6):
        other = new(loss=SupConLoss(0.2, learn_temperature=True).double())
        other(*towers())
        with torch.no_grad():
            other.loss.log_temperature += step
        values.append(other(*towers(k=1)).item())
    assert found.item() == pytest.approx((values[1] - values[0]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("keys", [False, True])
def test_training_with_a_memory_does_not_move_all_embeddings_to_one_point(keys):
    """References that the memory's negatives do not push away would: the mean of the embeddings would have length 0.98."""
    x = torch.randn(400, 32) + 2
    inputs = x, x + torch.randn(400, 32)
    nets = [nn.Linear(32, 32), nn.Linear(32, 32)]
    slow = [MomentumEncoder(net, 0.9) for net in nets]
    criterion = TwoTowerLoss(SupConLoss(0.1), size=256, dim=32)
    optimizer = torch.optim.Adam([p for net in nets for p in net.parameters()], lr=0.003)

    def embed(nets, ids):
        return tuple(F.normalize(net(x[ids])) for net, x in zip(nets, inputs))

    for _ in range(200):
        ids = torch.randint(0, 400, (16,))
        loss = criterion(*embed(nets, ids), labels=ids, keys=embed(slow, ids) if keys else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for each in slow:
            each.update()
    with torch.no_grad():
        q, d = embed(nets, torch.arange(400))
    assert max(q.mean(0).norm(), d.mean(0).norm()) < 0.7
    assert ((q @ d.T).argmax(1) == torch.arange(400)).float().mean() > 0.6


def test_repeated_documents_are_positives_and_never_negatives():
    criterion, documents = new(), torch.tensor([3, 4, 3, 5, 3])
    q, d = towers()
    criterion(q, d, labels=documents)
    _, (forth, back) = criterion(*towers(k=1), labels=documents, return_stats=True)
    assert forth.valid_positives.tolist() == back.valid_positives.tolist() == [6, 2, 6, 2, 6]
    assert (forth.valid_positives + forth.valid_negatives).tolist() == [10] * 5


@pytest.mark.parametrize("form", ["(m, h, D)", "(n, D)"])
def test_mined_negatives_join_the_documents_only_and_are_not_enqueued(form):
    criterion, (q, d) = new(), towers()
    hard = F.normalize(torch.randn(10, 7, dtype=torch.float64)).requires_grad_()
    given = hard.view(5, 2, 7) if form == "(m, h, D)" else hard
    loss, (forth, back) = criterion(q, d, negatives=given, return_stats=True)
    assert forth.valid_negatives.tolist() == [14] * 5 and back.valid_negatives.tolist() == [4] * 5
    numbers, none = torch.arange(5), torch.full((10,), -1)
    expected = plainly(criterion.loss, q, numbers, torch.cat([d, hard]), torch.cat([numbers, none]))
    expected = (expected + plainly(criterion.loss, d, numbers, q, numbers)) / 2
    assert torch.allclose(loss, expected)
    for mine, theirs in zip(torch.autograd.grad(loss, (q, d, hard)), torch.autograd.grad(expected, (q, d, hard))):
        assert torch.allclose(mine, theirs)
    assert len(criterion.documents) == 5
    _, (forth, _) = criterion(*towers(k=1), negatives=given, return_stats=True)
    assert forth.valid_negatives.tolist() == [4 + 10 + 5] * 5  # the past documents stay beside them


@pytest.mark.parametrize("lowest", [-1, 0, -(2**62)])
def test_a_mined_negative_has_the_label_of_no_pair(lowest):
    criterion, (q, d) = new(), towers()
    _, (forth, _) = criterion(q, d, labels=lowest + torch.arange(5), negatives=d.detach()[:2], return_stats=True)
    assert forth.valid_positives.tolist() == [1] * 5 and forth.valid_negatives.tolist() == [6] * 5


def test_a_negative_with_a_querys_label_is_its_positive():
    criterion, (q, d) = new(), towers()
    _, (forth, _) = criterion(
        q, d, labels=torch.arange(5), negatives=d.detach()[:2], negative_labels=torch.tensor([1, 9]), return_stats=True
    )
    assert forth.valid_positives.tolist() == [1, 2, 1, 1, 1]


def test_in_eval_nothing_is_enqueued_or_numbered():
    criterion = new()
    criterion(*towers())
    before = copy.deepcopy(criterion.state_dict())
    criterion.eval()
    criterion(*towers(k=1))
    assert all(torch.equal(before[name], value) for name, value in criterion.state_dict().items())


def test_keys_are_enqueued_instead():
    criterion, keys = new(), towers(k=9)
    criterion(*towers(), keys=keys)
    assert torch.equal(criterion.queries.embeddings, keys[0]) and torch.equal(criterion.documents.embeddings, keys[1])
    with pytest.raises(InputError, match="keys"):
        criterion(*towers(), keys=towers(4))


def test_a_saved_criterion_goes_on_where_it_stopped():
    criterion = new(size=12, loss=SupConLoss(0.2, learn_temperature=True))
    for k in range(3):
        criterion(*towers(k=k))
    other = new(size=12, loss=SupConLoss(learn_temperature=True))
    other.load_state_dict(criterion.state_dict())
    assert torch.equal(other(*towers(k=7)), criterion(*towers(k=7)))
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), criterion.state_dict().values()))
    with pytest.raises(InputError, match="always or never"):
        other(*towers(), labels=torch.arange(5))


@pytest.mark.parametrize("first", [None, torch.arange(5)])
def test_a_loaded_criterion_knows_whether_its_pairs_had_labels(first):
    criterion, other = new(), new()
    criterion(*towers(), labels=first)
    other.load_state_dict(criterion.state_dict())
    with pytest.raises(InputError, match="always or never"):
        other(*towers(), labels=torch.arange(5) if first is None else None)


@pytest.mark.parametrize(("size", "dim", "named"), [(12, 7, "size=12, dim=7"), (40, 6, "size=40, dim=6"), (0, 7, "size=0")])
def test_a_state_of_another_size_is_refused_before_any_of_it_is_loaded(size, dim, named):
    criterion, other = (
        new(loss=SupConLoss(0.2, learn_temperature=True)),
        TwoTowerLoss(SupConLoss(learn_temperature=True), size, dim),
    )
    criterion(*towers())
    before = copy.deepcopy(other.state_dict())
    for one, state, says in (
        (other, criterion, rf"with size=40, dim=7, this one has {named}"),
        (criterion, other, f"with {named}"),
    ):
        with pytest.raises(InputError, match=says) as error:
            one.load_state_dict(state.state_dict())
        assert "\n" not in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_without_labels_a_pair_seen_again_is_its_own_negative():
    (q, d), index = towers(), torch.arange(5)
    for labels, positives in ((None, 1), (index, 2)):
        criterion = new()
        criterion(q, d, labels=labels)
        _, (forth, back) = criterion(q, d, labels=labels, return_stats=True)
        assert forth.valid_positives.tolist() == back.valid_positives.tolist() == [positives] * 5


@pytest.mark.parametrize(("shape", "labels", "says"), [
    ((4, 2, 7), None, "5 queries but negatives for 4"),
    ((5, 2, 7), (10,), r"shape \(5, 2\), got \(10,\)"),
    ((5, 2, 7), (2, 5), r"shape \(5, 2\), got \(2, 5\)"),
    ((10, 7), (5, 2), "pass one per row"),
])  # fmt: skip
def test_negatives_and_their_labels_have_the_shapes_stated(shape, labels, says):
    criterion, hard = new(), F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)
    named = {} if labels is None else {"labels": torch.arange(5), "negative_labels": torch.arange(10).view(labels)}
    with pytest.raises(InputError, match=says):
        criterion(*towers(), negatives=hard, **named)
    assert len(criterion.documents) == 0


@pytest.mark.parametrize("first", [None, torch.arange(5)])
def test_labels_and_numbers_are_not_mixed(first):
    criterion = new()
    criterion(*towers(), labels=first)
    with pytest.raises(InputError, match="always or never"):
        criterion(*towers(), labels=torch.arange(5) if first is None else None)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    criterion, (q, d) = new(), towers()
    with pytest.raises(InputError, match="5 queries but 4 documents"):
        criterion(q, d[:4])
    with pytest.raises(InputError, match="dimension 7"):
        criterion(q, d[:, :6])
    with pytest.raises(InputError, match="negatives too"):
        criterion(q, d, labels=torch.arange(5), negative_labels=torch.arange(5))
    with pytest.raises(InputError, match="labels"):  # they would be compared with the numbers of the pairs
        criterion(q, d, negatives=d.detach(), negative_labels=torch.arange(5))
    with pytest.raises(InputError, match="size"):
        new(size=-1)
    with pytest.raises(InputError, match="dim"):
        TwoTowerLoss(SupConLoss(), 0, 0)
    with pytest.raises(InputError, match="pair loss of xbm"):
        TwoTowerLoss(nn.MSELoss(), 4, 2)
    with pytest.raises(InputError, match=r"got MetricLearningLoss; .* with references and a memory"):
        TwoTowerLoss(MetricLearningLoss(lambda v, labels, indices_tuple: v.sum()), 4, 2)
    with pytest.raises(InputError, match="exclude"):
        TwoTowerLoss(SupConLoss(exclude="instance"), 4, 2)
    assert int(criterion.pairs) == 0 and len(criterion.queries) == 0


@pytest.mark.parametrize("what", ["queries", "documents", "negatives", "keys of the queries", "keys of the documents"])
def test_an_error_names_the_rows_at_fault_and_nothing_is_enqueued(what):
    criterion, (q, d), (k, e) = new(), towers(), towers(k=1)
    rows = {"queries": q, "documents": d, "negatives": d.detach(), "keys of the queries": k, "keys of the documents": e}
    for factor, sentence in ((2, f"row 0 of the {what} has length 2"), (torch.nan, f"{what} contains NaN")):
        q, d, negatives, *keys = {**rows, what: rows[what] * factor}.values()
        with pytest.raises(InputError, match=sentence):
            criterion(q, d, negatives=negatives, keys=tuple(keys))
        assert len(criterion.queries) == len(criterion.documents) == int(criterion.pairs) == 0


def test_rows_of_another_length_or_device_say_how_to_build_the_loss():
    with pytest.raises(InputError, match=r"TwoTowerLoss\(dim=6\)"):
        new()(*towers(D=6))
    with pytest.raises(InputError, match=r"TwoTowerLoss with \.to\('cpu'\)"):
        new(device="meta")(*towers())


@pytest.mark.parametrize("keys", [towers()[:1], (None, None), towers() + towers()[:1], towers()[0]])
def test_keys_are_two_tensors(keys):
    criterion = new()
    with pytest.raises(InputError, match="two tensors"):
        criterion(*towers(), keys=keys)
    assert len(criterion.queries) == 0


@pytest.mark.parametrize("labels", [None, torch.tensor([3, 4, 3, 5, 3])])
def test_without_memory_only_the_batch_counts(labels):
    criterion, like = new(size=0), new().eval()
    for k in range(3):
        (q, d), (p, e) = towers(k=k), towers(k=k)
        loss, (forth, back) = criterion(q, d, labels=labels, return_stats=True)
        expected = like(p, e, labels=labels)
        assert torch.allclose(loss, expected)
        for mine, theirs in zip(torch.autograd.grad(loss, (q, d)), torch.autograd.grad(expected, (p, e))):
            assert torch.allclose(mine, theirs)
        assert (forth.valid_positives + forth.valid_negatives).tolist() == [5] * 5
        assert (back.valid_positives + back.valid_negatives).tolist() == [5] * 5
    other = new(size=0)
    other.load_state_dict(criterion.state_dict())
    assert "queries" not in str(criterion) and criterion.queries is criterion.documents is None


def test_a_compiled_step_gives_the_same():
    torch._dynamo.reset()
    eager, compiled = new(), new()
    step = torch.compile(compiled, backend="aot_eager")
    for k in range(3):
        q, d = towers(k=k)
        a, b = eager(q, d), step(q, d)
        assert torch.allclose(a, b)
        for mine, theirs in zip(torch.autograd.grad(a, (q, d)), torch.autograd.grad(b, (q, d))):
            assert torch.allclose(mine, theirs)


def test_the_label_of_mined_negatives_is_refused_as_a_label():
    """With it, every mined negative would be a positive."""
    criterion, (q, d) = new(), towers(3)
    with pytest.raises(
        InputError, match=rf"row 1 has the label {NO_LABEL}, which marks mined negatives: pass any other"
    ) as caught:
        criterion(q, d, labels=torch.tensor([1, NO_LABEL, 2]), negatives=d.detach())
    assert "\n" not in str(caught.value) and int(criterion.pairs) == 0
    found = [new()(q, d, labels=torch.tensor([1, label, 2]), negatives=d.detach()) for label in (NO_LABEL + 1, 7)]
    assert torch.equal(*found)


# ------------------------------------------------------------------ several processes


def play(world: int, sizes: list[list[int]], learn: bool, hard: bool, labelled: bool, size: int = 17) -> dict:
    """Two linear towers trained for some steps; the same on one process (world 0) and on many."""
    torch.manual_seed(0)
    nets = [nn.Linear(6, 7, dtype=torch.float64) for _ in range(2)]
    models = [nn.parallel.DistributedDataParallel(net) for net in nets] if world else nets
    criterion = new(size=size, loss=SupConLoss(0.2, learn_temperature=learn).double())
    parameters = [p for net in (*nets, criterion) for p in net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    rank, losses = dist.get_rank() if world else 0, []
    for k, split in enumerate(sizes):
        draw = torch.Generator().manual_seed(k)
        inputs = [torch.randn(6, 6, dtype=torch.float64, generator=draw) for _ in range(3)]
        labels = torch.randint(0, 4, (6,), generator=draw)
        if world:
            *inputs, labels = (x.split(split)[rank] for x in (*inputs, labels))
        q, d = (F.normalize(model(x)) for model, x in zip(models, inputs))
        negatives = F.normalize(nets[1](inputs[2])).detach() if hard else None
        loss = criterion(q, d, labels=labels if labelled else None, negatives=negatives)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": [p.detach().clone() for p in parameters], "state": criterion.state_dict()}


SIZES = {1: [[6]] * 5, 2: [[3, 3], [6, 0], [1, 5], [4, 2], [0, 6]], 3: [[2, 2, 2], [0, 6, 0], [1, 2, 3], [5, 1, 0], [2, 2, 2]]}


def play_all(world: int) -> list[dict]:
    return [play(world, SIZES[world], *case) for case in CASES]


CASES = [(False, False, False), (True, True, False), (True, False, True), (True, True, True, 0)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_several_processes_are_one(world):
    ranks = on_ranks(world, play_all, world)
    for number, case in enumerate(CASES):
        alone = play(0, SIZES[1], *case)
        for each in (rank[number] for rank in ranks):
            assert each["losses"] == pytest.approx(alone["losses"], rel=1e-9)
            for mine, theirs in zip(each["weights"], alone["weights"]):
                assert torch.allclose(mine, theirs, rtol=1e-9)
            for name, value in alone["state"].items():
                assert torch.allclose(each["state"][name].double(), value.double(), rtol=1e-9), name
