"""Every loss class of pytorch-metric-learning in our wrapper: as if called directly, or refused with one sentence."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml

from xbm import ContrastiveLoss, CrossBatchMemory, InputError, MetricLearningLoss

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # their HistogramLoss
CLASSES, DIM = 6, 13
BASES = {"BaseLossWrapper", "BaseMetricLossFunction", "EmbeddingRegularizerMixin", "GenericPairLoss", "WeightRegularizerMixin"}
SIZES = {"num_classes": CLASSES, "embedding_size": DIM}
ARGUMENTS = {
    **dict.fromkeys(
        (
            "ArcFaceLoss", "CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "ProxyNCALoss",
            "SoftTripleLoss", "SphereFaceLoss", "SubCenterArcFaceLoss",
        ),
        SIZES,
    ),
    "P2SGradLoss": {"num_classes": CLASSES, "descriptors_dim": DIM},
    "ManifoldLoss": {"l": DIM, "K": 3},
    "RankedListLoss": {"margin": 0.4, "Tn": 1},
}  # fmt: skip
WRAPPERS = {
    "CrossBatchMemory": lambda: pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM),
    "MultipleLosses": lambda: pml.MultipleLosses([pml.ContrastiveLoss(), pml.ProxyAnchorLoss(**SIZES)]),
    "SelfSupervisedLoss": lambda: pml.SelfSupervisedLoss(pml.ContrastiveLoss()),
}
ALL = sorted(name for name, kind in vars(pml).items() if inspect.isclass(kind) and name not in BASES)
NEVER = {"CrossBatchMemory", "ManifoldLoss", "SelfSupervisedLoss", "VICRegLoss"}
USABLE = [name for name in ALL if name not in NEVER]
WITH_MEMORY = [name for name in USABLE if MetricLearningLoss.takes_memory(getattr(pml, name))]
PAIRED = {*WITH_MEMORY, "HistogramLoss", "LiftedStructureLoss", "NPairsLoss", "ThresholdConsistentMarginLoss"}
LEARNED = {"MultipleLosses", "P2SGradLoss", *ARGUMENTS} - {"ManifoldLoss", "RankedListLoss"}


def build(name, **options):
    torch.manual_seed(0)
    if name in WRAPPERS:
        return WRAPPERS[name]()
    return getattr(pml, name)(**{**ARGUMENTS.get(name, {}), **options})


def embeddings(labels, seed):
    """Unit rows that gather by class, loosely."""
    centres = torch.randn(CLASSES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(len(labels), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(centres[labels % CLASSES] + 1.7 * noise)


def assert_same(module, wrapped, direct, v):
    """Value and gradients, in the anchors and in the parameters, of the wrapper and of the loss itself."""
    twin = copy.deepcopy(module)
    results = []
    for loss, call in ((module, wrapped), (twin, direct)):
        x = v.clone().requires_grad_()
        value = call(loss, x)
        value.backward()
        results.append([value, x.grad, *(parameter.grad for parameter in loss.parameters())])
    assert results[1][1].abs().max() > 1e-4, "the comparison is not about nothing"
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs) and (ours != 0).any()


def test_the_classes_that_take_a_memory_are_these():
    """A new class of pytorch-metric-learning appears here first: look at what it does with reference rows."""
    assert WITH_MEMORY == [
        "AngularLoss", "CircleLoss", "ContrastiveLoss", "DynamicSoftMarginLoss", "GeneralizedLiftedStructureLoss",
        "IntraPairVarianceLoss", "MarginLoss", "MultiSimilarityLoss", "NTXentLoss", "SignalToNoiseRatioContrastiveLoss",
        "SupConLoss", "TripletMarginLoss", "TupletMarginLoss",
    ]  # fmt: skip
    assert len(ALL) == len(WITH_MEMORY) + len(NEVER) + 21


@pytest.mark.parametrize("name", USABLE)
def test_within_a_batch_it_is_as_if_called_directly(name):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])  # classes of several sizes: no weights may come from that
    if name == "SmoothAPLoss":
        labels = torch.tensor([0, 0, 0, 1, 1, 1, 5, 5, 5])  # the only arrangement that it computes
    views = torch.arange(9) + 100
    given_ids = [None, views]
    if name not in PAIRED:
        given_ids.append(views // 4)  # several views of an image: for a loss that takes no pairs this changes nothing
    for ids in given_ids:
        assert_same(
            MetricLearningLoss(build(name)),
            lambda loss, x, ids=ids: loss(x, labels, ids=ids),
            lambda loss, x: loss.loss(x, labels),
            embeddings(labels, 3),
        )


@pytest.mark.parametrize("name", sorted(NEVER))
def test_a_loss_that_cannot_be_called_like_ours_is_refused_at_once(name):
    with pytest.raises(InputError, match=rf"^{name} of pytorch-metric-learning (takes no labels|has a memory of its own): "):
        MetricLearningLoss(build(name))
    assert not MetricLearningLoss.takes_memory(getattr(pml, name))


def bank():
    """A queue that is not full, in which every anchor has older and newest copies, and other rows of its class."""
    memory = CrossBatchMemory(41, DIM, dtype=torch.float64)
    for step in range(4):
        ids = (torch.arange(8) * 3 + step) % 17
        memory.enqueue(embeddings(ids % 5, 20 + step), ids % 5, ids)
    return memory, ids, ids % 5


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_against_a_memory_it_is_as_if_called_with_these_pairs(name):
    memory, ids, labels = bank()
    n = len(memory)
    other, alike = memory.row_ids[:n] != ids[:, None], memory.row_labels[:n] == labels[:, None]
    pairs = (*(alike & other).nonzero(as_tuple=True), *(~alike & other).nonzero(as_tuple=True))
    assert_same(
        MetricLearningLoss(build(name)),
        lambda loss, x: loss(x, labels, memory, ids=ids),
        lambda loss, x: loss.loss(x, labels, pairs, memory.rows[:n], memory.row_labels[:n]),
        embeddings(labels, 23),
    )


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_against_a_memory_neither_the_order_of_rows_nor_excluded_rows_matter(name):
    memory, ids, labels = bank()
    v = embeddings(labels, 23)
    value = MetricLearningLoss(build(name))(v, labels, memory, ids=ids).item()
    mixed, order = copy.deepcopy(memory), torch.randperm(memory.size)
    for buffer in (mixed.rows, mixed.row_labels, mixed.row_ids, mixed.stamps):
        buffer.copy_(buffer[order])
    assert MetricLearningLoss(build(name))(v, labels, mixed, ids=ids).item() == pytest.approx(value, rel=1e-12)
    views, label, one = embeddings(labels[:1].repeat(2), 1), labels[:1].repeat(2), ids[:1].repeat(2)
    changed = copy.deepcopy(memory)
    changed.rows[memory.row_ids == ids[0]] = views[0]
    values = [MetricLearningLoss(build(name))(views, label, each, ids=one).item() for each in (memory, changed)]
    assert values[0] == values[1] != 0


@pytest.mark.parametrize("name", [name for name in USABLE if name not in WITH_MEMORY])
def test_any_other_refuses_a_memory_with_one_sentence(name):
    memory, ids, labels = bank()
    with pytest.raises(InputError) as caught:
        MetricLearningLoss(build(name))(embeddings(labels, 23), labels, memory, ids=ids)
    said = str(caught.value)
    assert said.startswith(f"{name} compares ") and "omit the memory" in said and "\n" not in said
    assert ("its own proxies" in said) is (name in LEARNED - {"MultipleLosses"})


def test_swapped_triplets_refuse_a_memory_too():
    memory, ids, labels = bank()
    loss_fn = MetricLearningLoss(build("TripletMarginLoss", swap=True))
    assert loss_fn(embeddings(labels, 23), labels, ids=ids) > 0
    assert not MetricLearningLoss.takes_memory(loss_fn.loss)
    with pytest.raises(InputError, match=r"swap=True compares only .*: omit the memory and the references, or set swap=False"):
        loss_fn(embeddings(labels, 23), labels, memory, ids=ids)


@pytest.mark.parametrize("name", sorted(PAIRED))
def test_a_loss_that_takes_pairs_leaves_out_two_views_of_one_image(name):
    labels, ids = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([5, 5, 6, 7, 7, 8, 9])
    other, alike = ids != ids[:, None], labels == labels[:, None]
    pairs = (*(alike & other).nonzero(as_tuple=True), *(~alike & other).nonzero(as_tuple=True))
    assert_same(
        MetricLearningLoss(build(name)),
        lambda loss, x: loss(x, labels, ids=ids),
        lambda loss, x: loss.loss(x, labels, pairs),
        embeddings(labels, 8),
    )


def test_a_subclass_is_treated_like_its_base():
    class Mine(pml.ProxyAnchorLoss):
        pass

    class Plain(torch.nn.Module):
        """A class of one's own that happens to have the name of one of theirs."""

    Plain.__name__ = "ProxyAnchorLoss"
    assert not MetricLearningLoss.takes_memory(Mine) and MetricLearningLoss.takes_memory(Plain)


# ------------------------------------------------------------------ parameters and state


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_its_parameters_are_the_wrappers_and_are_trained(name):
    loss_fn, labels = MetricLearningLoss(build(name)).double(), torch.arange(6)
    parameters = list(loss_fn.parameters())
    assert [id(p) for p in parameters] == [id(p) for p in loss_fn.loss.parameters()] and len(parameters) == 1
    optimizer, v = torch.optim.SGD(parameters, lr=0.01), embeddings(labels, 4)
    before = loss_fn(v, labels)
    before.backward()
    optimizer.step()
    assert loss_fn(v, labels) < before


@pytest.mark.parametrize("name", USABLE)
def test_one_step_follows_another(name):
    """DynamicSoftMarginLoss itself fails at the second: its histogram remembers the first."""
    loss_fn, labels = MetricLearningLoss(build(name)).double(), torch.tensor([0, 0, 0, 1, 1, 1, 5, 5, 5])
    for step in range(3):
        x = embeddings(labels, step).requires_grad_()
        loss_fn(x, labels).backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", USABLE)
def test_its_state_goes_through_a_file(name, tmp_path):
    """Whatever a call depends on is in the state: the second call after loading equals the second call."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 5, 5, 5])
    one, v = MetricLearningLoss(build(name)).double(), embeddings(labels, 5)
    for p in one.parameters():
        p.data += 0.1
    one(v, labels)
    torch.save(one.state_dict(), tmp_path / "loss.pt")
    other = MetricLearningLoss(build(name)).double()
    other.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    w = embeddings(labels, 6)
    assert torch.equal(one(w, labels), other(w, labels))


def test_the_histogram_of_a_dynamic_margin_is_part_of_its_state():
    loss_fn = MetricLearningLoss(build("DynamicSoftMarginLoss"))
    loss_fn(embeddings(torch.arange(9) % 3, 1), torch.arange(9) % 3)
    assert loss_fn.state_dict()["loss.hist_"].sum() == pytest.approx(1)


@pytest.mark.parametrize("name", sorted(LEARNED - {"MultipleLosses"}))
@pytest.mark.parametrize("labels", [[0, 6], [-1, 2]])
def test_labels_without_a_proxy_are_refused(name, labels):
    with pytest.raises(InputError, match=rf"{name} has proxies for 6 classes, got labels from {labels[0]} to {labels[1]}: "):
        MetricLearningLoss(build(name))(embeddings(torch.arange(2), 1), torch.tensor(labels))


@pytest.mark.parametrize("name", ["ProxyAnchorLoss", "FastAPLoss", "ContrastiveLoss"])
def test_an_empty_batch_gives_zero_and_bad_anchors_are_refused(name):
    loss_fn = MetricLearningLoss(build(name))
    x = torch.zeros(0, DIM, requires_grad=True)
    loss = loss_fn(x, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and x.grad.shape == (0, DIM)
    with pytest.raises(InputError, match="has length 2, not 1"):
        loss_fn(2 * torch.eye(3, DIM), torch.arange(3))


def test_a_copy_of_the_wrapper_has_parameters_of_its_own():
    one = MetricLearningLoss(build("ProxyAnchorLoss"))
    other = copy.deepcopy(one)
    other.loss.proxies.data.zero_()
    assert one.loss.proxies.abs().sum() > 0


# ------------------------------------------------------------------ what does not fit is one sentence


def refused(call, match):
    with pytest.raises(InputError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (pml.ProxyAnchorLoss, r"got the class ProxyAnchorLoss: pass an object, ProxyAnchorLoss\(\.\.\.\)"),
        (ContrastiveLoss, "got the class ContrastiveLoss"),
        ("ProxyAnchorLoss", "must be a loss of pytorch-metric-learning, got 'ProxyAnchorLoss'"),
        (None, "must be a loss of pytorch-metric-learning, got None"),
        (ContrastiveLoss(), "ContrastiveLoss is a loss of xbm: call it directly"),
        (torch.nn.CrossEntropyLoss(), "CrossEntropyLoss takes no indices_tuple"),
        (lambda v, labels: v.sum(), "takes no indices_tuple"),
    ],
    ids=["class", "own class", "text", "None", "own loss", "no pairs", "function"],
)
def test_what_is_no_loss_over_pairs_is_refused_at_once(loss, match):
    refused(lambda: MetricLearningLoss(loss), match)


def test_a_loss_of_ones_own_that_takes_pairs_is_wrapped():
    v, labels = embeddings(torch.arange(6) % 3, 1), torch.arange(6) % 3
    for own in (lambda *_, indices_tuple: v.sum(), lambda *_, **named: v.sum()):
        assert MetricLearningLoss(own)(v, labels) == v.sum()


def test_an_adapter_is_not_wrapped_again():
    refused(lambda: MetricLearningLoss(MetricLearningLoss(pml.ContrastiveLoss())), "MetricLearningLoss is a loss of xbm")


def test_a_refused_loss_is_found_inside_several():
    several = pml.MultipleLosses({"one": pml.ContrastiveLoss(), "other": pml.MultipleLosses([pml.VICRegLoss()])})
    refused(lambda: MetricLearningLoss(several), "VICRegLoss of pytorch-metric-learning takes no labels")


@pytest.mark.parametrize("losses", [list, lambda losses: dict(zip("ab", losses)), lambda losses: [pml.MultipleLosses(losses)]])
def test_proxies_are_checked_inside_several_losses_too(losses):
    loss_fn = MetricLearningLoss(pml.MultipleLosses(losses([pml.ContrastiveLoss(), pml.ProxyAnchorLoss(2, 8)])))
    v = F.normalize(torch.randn(4, 8))
    assert loss_fn(v, torch.tensor([0, 0, 1, 1])) > 0
    refused(lambda: loss_fn(v, torch.tensor([0, 0, 1, 2])), "ProxyAnchorLoss has proxies for 2 classes, got labels from 0 to 2")
    wide = F.normalize(torch.randn(4, 9))
    refused(lambda: loss_fn(wide, torch.tensor([0, 0, 1, 1])), "ProxyAnchorLoss has proxies of dimension 8")


@pytest.mark.parametrize("name", sorted(LEARNED - {"MultipleLosses"}))
def test_anchors_of_another_dimension_are_refused(name):
    labels, size = torch.arange(3), "descriptors_dim" if name == "P2SGradLoss" else "embedding_size"
    expected = rf"^{name} has proxies of dimension {DIM}, the anchors have 5 columns: build the loss with {size}=5$"
    refused(lambda: MetricLearningLoss(build(name))(F.normalize(torch.randn(3, 5)), labels), expected)


@pytest.mark.parametrize("name", ["ProxyAnchorLoss", "FastAPLoss", "ContrastiveLoss"])
def test_arguments_that_would_be_ignored_are_refused(name):
    loss_fn, labels = MetricLearningLoss(build(name)), torch.arange(4) // 2
    v = embeddings(labels, 1)
    refused(lambda: MetricLearningLoss(build(name), exclude="foo"), "unknown exclude 'foo'")
    refused(lambda: loss_fn(v, labels, reference_labels=labels), "pass references too")
    refused(lambda: loss_fn(v, labels, reference_ids=labels), "pass references too")
    refused(lambda: loss_fn(v, labels, return_stats=True), "no statistics of pairs: leave out return_stats")
