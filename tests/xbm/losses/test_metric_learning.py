"""Our gradients against pytorch-metric-learning's where the definitions coincide, and its losses on our memory.

To make them coincide:
- its similarity is the cosine of whatever it is given, so both are differentiated in x with v = normalise(x);
- its contrastive and triplet losses default to distances and to an average over the non-zero pairs of the whole batch: here
  they get the cosine and a sum, which is m times ours;
- its contrastive loss takes [1 − S]₊ with pos_margin=1 and neg_margin=λ: 1 − S, since no cosine passes 1;
- its MS loss averages over all anchors, as we do. With its miner an anchor keeps pairs on both sides or on neither, so that
  "an anchor with one side left adds nothing", which only we state, never makes a difference. Without a miner it counts each
  side alone, like `mining=False`;
- it knows no ids: the anchors are in the bank nowhere, or (its own memory) as the rows enqueued last, which it leaves out.
It returns 0 for a call with at most one pair on either side, where ours counts that pair: no such call here.
"""

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import CrossBatchMemory as TheirMemory
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import SumReducer

from xbm import ContrastiveLoss, CrossBatchMemory, InputError, MetricLearningLoss, MultiSimilarityLoss, TripletLoss
from xbm.engine import streaming

M_ANCHORS, M_ROWS, DIM = 9, 83, 13


def summed(loss):
    return lambda v, labels, *rest: loss(v, labels, *rest) / len(v)


def mined(v, labels, rows=None, row_labels=None, epsilon=0.1):
    pairs = MultiSimilarityMiner(epsilon=epsilon)(v, labels, rows, row_labels)
    return pml.MultiSimilarityLoss(alpha=2, beta=40, base=0.5)(v, labels, pairs, rows, row_labels)


def theirs_contrastive(margin=0.5):
    return pml.ContrastiveLoss(pos_margin=1, neg_margin=margin, distance=CosineSimilarity(), reducer=SumReducer())


def theirs_triplet(margin=0.1):
    return pml.TripletMarginLoss(
        margin=margin, smooth_loss=False, triplets_per_anchor="all", distance=CosineSimilarity(), reducer=SumReducer()
    )


def on_all(loss):
    """Their loss on every pair: (v, labels, rows, row_labels)."""
    return lambda v, labels, *bank: loss(v, labels, None, *bank)


COINCIDE = {
    "contrastive": (ContrastiveLoss, {}, summed(on_all(theirs_contrastive()))),
    "contrastive, another margin": (ContrastiveLoss, {"margin": 0.2}, summed(on_all(theirs_contrastive(0.2)))),
    "triplet": (TripletLoss, {}, summed(on_all(theirs_triplet()))),
    "triplet, another margin": (TripletLoss, {"margin": 0.3}, summed(on_all(theirs_triplet(0.3)))),
    "multi-similarity": (MultiSimilarityLoss, {}, mined),
    "multi-similarity, no mining": (
        MultiSimilarityLoss,
        {"mining": False, "alpha": 3.0, "beta": 20.0, "base": 0.4},
        on_all(pml.MultiSimilarityLoss(alpha=3.0, beta=20.0, base=0.4)),
    ),
}


def embeddings(labels, seed):
    """Raw embeddings that gather by class, loosely: some pairs are easy and some are not."""
    centres = torch.randn(6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(len(labels), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return centres[labels % 6] + 1.7 * noise


def gradients(ours, theirs, x):
    found = []
    for loss in (ours, theirs):
        raw = x.clone().requires_grad_()
        value = loss(F.normalize(raw))
        value.backward()
        found.append((value.detach(), raw.grad))
    return found


def assert_same(ours, theirs, x):
    (a, of_a), (b, of_b) = gradients(ours, theirs, x)
    assert of_b.abs().max() > 1e-3, "the comparison is not about nothing"
    assert torch.allclose(a, b, rtol=1e-10, atol=0) and torch.allclose(of_a, of_b, atol=1e-10, rtol=0)


@pytest.fixture(params=["reference", "all at once", "in tiles"])
def engine(request, monkeypatch):
    if request.param == "in tiles":
        monkeypatch.setattr(streaming, "SMALL", -1)
        monkeypatch.setattr(streaming, "TILE", DIM * 20)
    return "reference" if request.param == "reference" else "streaming"


@pytest.mark.parametrize("name", COINCIDE)
def test_gradients_against_a_bank_equal_theirs(name, engine):
    make, options, theirs = COINCIDE[name]
    ours = make(**options, engine=engine)
    labels, row_labels = torch.tensor([0, 1, 2, 3, 4, 0, 1, 9, 5]), torch.arange(M_ROWS) % 5
    rows = F.normalize(embeddings(row_labels, 1))  # nobody is like anchor 7, whose class is its own, and anchor 8
    memory = CrossBatchMemory(M_ROWS, DIM, dtype=torch.float64)
    memory.enqueue(rows, row_labels, torch.arange(M_ROWS))
    ids = torch.arange(1000, 1000 + M_ANCHORS)
    assert_same(
        lambda v: ours(v, labels, memory, ids=ids), lambda v: theirs(v, labels, rows, row_labels), embeddings(labels, 2)
    )


@pytest.mark.parametrize("name", COINCIDE)
def test_gradients_within_a_batch_equal_theirs(name, engine):
    make, options, theirs = COINCIDE[name]
    ours = make(**options, engine=engine)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2])
    assert_same(lambda v: ours(v, labels), lambda v: theirs(v, labels), embeddings(labels, 3))


@pytest.mark.parametrize("name", ["contrastive", "triplet"])
def test_gradients_over_a_lap_equal_those_of_their_own_memory(name):
    """Without ids on either side: each leaves out the rows just enqueued. Not MS: its miner would see an anchor's own copy."""
    ours, theirs = {
        "contrastive": (ContrastiveLoss(), theirs_contrastive()),
        "triplet": (TripletLoss(margin=0.6), theirs_triplet(0.6)),
    }[name]
    memory, wrapped = CrossBatchMemory(20, DIM, dtype=torch.float64), TheirMemory(theirs, DIM, memory_size=20)
    wrapped.embedding_memory = wrapped.embedding_memory.double()

    def step(v, labels):
        memory.enqueue(v.detach(), labels)
        return ours(v, labels, memory)

    for lap in range(9):
        labels = (torch.arange(5) + lap) % 6
        labels[4] = labels[0]
        assert_same(
            lambda v, labels=labels: step(v, labels),
            lambda v, labels=labels: wrapped(v, labels) / 5,
            embeddings(labels, 10 + lap),
        )


# ------------------------------------------------------------------ their losses on our memory

ADAPTED = {
    "contrastive": lambda: pml.ContrastiveLoss(),
    "contrastive, cosine": theirs_contrastive,
    "triplet": lambda: pml.TripletMarginLoss(),
    "multi-similarity": lambda: pml.MultiSimilarityLoss(),
    "nt-xent": lambda: pml.NTXentLoss(),
    "circle": lambda: pml.CircleLoss(),
    "sup-con": lambda: pml.SupConLoss(),
}


def bank():
    """A queue in the middle of a lap, not full, with older and newest copies of the anchors."""
    memory = CrossBatchMemory(41, DIM, dtype=torch.float64)
    for step in range(4):
        ids = (torch.arange(8) * 3 + step) % 17
        memory.enqueue(F.normalize(embeddings(ids % 5, 20 + step)), ids % 5, ids)
    return memory, ids, ids % 5, embeddings(ids % 5, 23)


def pairs_by_hand(labels, ids, memory, exclude):
    """(a1, p, a2, n) over the bank's slots, by plain loops."""
    row_labels, row_ids, written = memory.row_labels.tolist(), memory.row_ids.tolist(), (memory.stamps >= 0).tolist()
    a1, p, a2, n = [], [], [], []
    for i, (label, one) in enumerate(zip(labels.tolist(), ids.tolist())):
        copies = [j for j in range(len(row_ids)) if written[j] and row_ids[j] == one]
        barred = copies if exclude == "instance" else copies[-1:]  # no lap is over: the last slot is the newest
        for j in range(len(row_ids)):
            if not written[j] or j in barred:
                continue
            (a1 if row_labels[j] == label else a2).append(i)
            (p if row_labels[j] == label else n).append(j)
    return tuple(torch.tensor(x) for x in (a1, p, a2, n))


@pytest.mark.parametrize("exclude", ["instance", "copy"])
@pytest.mark.parametrize("name", ADAPTED)
def test_any_of_their_losses_runs_on_our_memory(name, exclude):
    loss_fn = MetricLearningLoss(ADAPTED[name](), exclude=exclude)
    memory, ids, labels, x = bank()
    pairs = pairs_by_hand(labels, ids, memory, exclude)
    assert len(pairs[1]) > 0
    assert_same(
        lambda v: loss_fn(v, labels, memory, ids=ids),
        lambda v: ADAPTED[name]()(v, labels, pairs, memory.rows, memory.row_labels),
        x,
    )


@pytest.mark.parametrize("name", ADAPTED)
def test_any_of_their_losses_runs_within_a_batch(name):
    """Without ids the diagonal is left out, as they do themselves."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    loss_fn = MetricLearningLoss(ADAPTED[name]())
    assert_same(lambda v: loss_fn(v, labels), lambda v: ADAPTED[name]()(v, labels), embeddings(labels, 4))


def test_two_views_of_one_image_are_no_pair_to_their_losses_either():
    labels, ids = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([5, 5, 6, 7, 7])
    loss_fn = MetricLearningLoss(theirs_contrastive())
    only = (torch.tensor([2, 2, 3, 4]), torch.tensor([3, 4, 2, 2]))  # (0, 1) and (3, 4) are views of one image
    negatives = (labels[:, None] != labels).nonzero(as_tuple=True)
    assert_same(
        lambda v: loss_fn(v, labels, ids=ids),
        lambda v: theirs_contrastive()(v, labels, (*only, *negatives)),
        embeddings(labels, 5),
    )


def test_the_adapter_agrees_with_our_own_loss():
    memory, ids, labels, x = bank()
    adapted = MetricLearningLoss(theirs_contrastive())
    assert_same(
        lambda v: ContrastiveLoss()(v, labels, memory, ids=ids), lambda v: adapted(v, labels, memory, ids=ids) / len(ids), x
    )


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_bank_of_another_type_meets_the_anchors_in_theirs(stored):
    memory = CrossBatchMemory(6, DIM, dtype=stored)
    labels, ids = torch.arange(6) % 2, torch.arange(6)
    v = F.normalize(embeddings(labels, 6))
    memory.enqueue(v, labels, ids)
    loss = MetricLearningLoss(theirs_contrastive())(v, labels, memory, ids=ids)
    assert loss.dtype == torch.float64 and loss > 0


@pytest.mark.parametrize("m", [0, 2])
def test_an_empty_memory_or_batch_gives_zero_and_a_zero_gradient(m):
    x = torch.randn(2, DIM, requires_grad=True)
    v = F.normalize(x)[:m]
    loss = MetricLearningLoss(pml.TripletMarginLoss())(v, torch.arange(m), CrossBatchMemory(6, DIM), ids=torch.arange(m))
    loss.backward()
    assert loss == 0 and (x.grad == 0).all()


def test_a_loss_over_pairs_without_positives_warns():
    v, labels = F.normalize(torch.randn(6, 8)), torch.arange(6)
    loss_fn = MetricLearningLoss(pml.NTXentLoss())
    for _ in range(7):
        loss_fn(v, labels)
    with pytest.warns(UserWarning, match="labels that repeat"):
        loss_fn(v, labels)


@pytest.mark.parametrize("with_memory", [True, False])
def test_references_join_the_memory(with_memory):
    v, d = (F.normalize(torch.randn(6, 8, dtype=torch.float64)).requires_grad_() for _ in range(2))
    labels, memory = torch.arange(6) % 3, CrossBatchMemory(20, 8, dtype=torch.float64)
    memory.enqueue(F.normalize(torch.randn(9, 8, dtype=torch.float64)), torch.arange(9) % 3)
    bank = memory if with_memory else None
    found = MetricLearningLoss(pml.ContrastiveLoss(pos_margin=1, neg_margin=0.2, distance=CosineSimilarity()))(
        v, labels, bank, references=d
    )
    rows = torch.cat([d, memory.embeddings]) if with_memory else d
    row_labels = torch.cat([labels, memory.labels]) if with_memory else labels.clone()  # itself would mean the anchors
    plain = pml.ContrastiveLoss(pos_margin=1, neg_margin=0.2, distance=CosineSimilarity())
    expected = plain(v, labels, ref_emb=rows, ref_labels=row_labels)
    assert torch.allclose(found, expected)
    for mine, theirs in zip(torch.autograd.grad(found, (v, d)), torch.autograd.grad(expected, (v, d))):
        assert torch.allclose(mine, theirs)
    with pytest.raises(InputError, match="references"):
        MetricLearningLoss(pml.ProxyAnchorLoss(3, 8))(v, labels, references=d)
