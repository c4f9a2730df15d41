"""A loss behaves as any torch module: subclasses, copies, hyper-parameters, two losses of one name."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tests.known import NAMES
from tests.xbm.losses.scene import scene
from xbm import ContrastiveLoss, InputError, MultiSimilarityLoss, PairLoss, SupConLoss
from xbm.distributed import GlobalLoss, ShardedMemory
from xbm.engine import streaming
from xbm.engine.terms import Terms
from xbm.losses import LOSSES


class Scaled(ContrastiveLoss):
    """Its own constructor with another argument, and other formulas: negatives count `factor` times."""

    def __init__(self, factor, margin=0.2):
        super().__init__(margin)
        self.factor = factor

    def dense(self, S, positive, negative):
        valid = negative & (self.margin < S)
        return ((1 - S) * positive).sum(1) + self.factor * ((S - self.margin) * valid).sum(1)

    def negative(self, s, p, expand):
        return Terms(value=self.factor * (s - self.margin), weight=self.factor)


def values(loss_fn, s, way="streaming"):
    """Loss and gradient on an engine, or compiled."""
    v = s.anchors.detach().clone().requires_grad_()
    loss_fn.engine = "streaming" if way == "compiled" else way

    def call(x):
        return loss_fn(x, s.labels, s.memory, ids=s.ids)

    torch._dynamo.reset()  # every loss here compiles the same line anew
    step = torch.compile(call, fullgraph=True, backend="aot_eager") if way == "compiled" else call
    loss = step(v)
    loss.backward()
    return loss.item(), v.grad


WAYS = ["reference", "streaming", "compiled"]


@pytest.mark.parametrize("small", [-1, streaming.SMALL])
def test_a_subclass_with_other_formulas_and_arguments_is_itself_on_every_path(small, monkeypatch):
    monkeypatch.setattr(streaming, "SMALL", small)
    s = scene()
    results = {way: values(Scaled(2.5), s, way) for way in WAYS}
    base = values(ContrastiveLoss(0.2), s)
    for way in WAYS:
        assert results[way][0] == pytest.approx(results["reference"][0], rel=1e-10)
        assert torch.allclose(results[way][1], results["reference"][1], atol=1e-10)
        assert results[way][0] > base[0]


def test_a_subclass_changes_nothing_for_anybody_else():
    s = scene()
    before = {name: values(LOSSES[name](), s) for name in NAMES}

    class Mine(ContrastiveLoss):
        def positive(self, s, n, expand):
            return Terms(value=7 * (1 - s), weight=7.0)

    mine = values(Mine(), s)
    for name in NAMES:
        loss, gradient = values(LOSSES[name](), s)
        assert loss == before[name][0] and torch.equal(gradient, before[name][1])
    assert mine[0] != before["contrastive"][0] and LOSSES["contrastive"] is ContrastiveLoss


@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_is_defined_again_is_the_new_one(way):
    """As in a notebook: the cell is edited and run again, with the same names."""
    s, losses = scene(), []
    for factor in (1.0, 3.0):

        class Edited(ContrastiveLoss):
            name = "edited"

            def dense(self, S, positive, negative, factor=factor):
                return factor * super().dense(S, positive, negative)

            def negative(self, s, p, expand, factor=factor):
                return Terms(value=factor * (s - self.margin), weight=factor)

            def positive(self, s, n, expand, factor=factor):
                return Terms(value=factor * (1 - s), weight=factor)

        losses.append(Edited())
    first, second = (values(loss_fn, s, way)[0] for loss_fn in losses)
    assert second == pytest.approx(3 * first) and first > 0


@pytest.mark.parametrize("way", WAYS)
def test_two_losses_of_one_class_keep_their_own_settings(way):
    s = scene()
    narrow, wide = ContrastiveLoss(0.9), ContrastiveLoss(0.1)
    results = [values(loss_fn, s, way)[0] for loss_fn in (narrow, wide, narrow)]
    assert results[0] == results[2] < results[1]


def test_one_compiled_function_follows_the_loss_that_it_is_given():
    s = scene()
    step = torch.compile(lambda loss_fn, v: loss_fn(v, s.labels, s.memory, ids=s.ids), fullgraph=True, backend="aot_eager")
    for loss_fn in (ContrastiveLoss(0.1), ContrastiveLoss(0.9), Scaled(2.0)):
        assert torch.allclose(step(loss_fn, s.anchors), loss_fn(s.anchors, s.labels, s.memory, ids=s.ids))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_loss_of_its_own_also_when_compiled(duplicate):
    s = scene()
    original = ContrastiveLoss(0.1)
    twin = duplicate(original)
    twin.margin = 0.8
    assert twin.handle != original.handle and original.margin == 0.1
    assert values(twin, s, "compiled")[0] == pytest.approx(values(ContrastiveLoss(0.8), s)[0])
    assert values(original, s, "compiled")[0] == pytest.approx(values(ContrastiveLoss(0.1), s)[0])


def test_a_saved_loss_works_in_another_process_where_handles_differ():
    buffer = io.BytesIO()
    torch.save(MultiSimilarityLoss(beta=20.0), buffer)
    buffer.seek(0)
    loaded, s = torch.load(buffer, weights_only=False), scene()
    assert values(loaded, s, "compiled")[0] == pytest.approx(values(MultiSimilarityLoss(beta=20.0), s)[0])


def test_losses_that_nobody_holds_are_forgotten():
    from xbm import engine

    gc.collect()
    before = len(engine._losses)
    for _ in range(50):
        ContrastiveLoss()
    gc.collect()
    assert len(engine._losses) <= before


# ------------------------------------------------------------------ hyper-parameters


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25), torch.tensor([0.25])])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_numpy_and_torch_are_plain_numbers(value, way):
    s = scene()
    loss_fn = ContrastiveLoss(margin=value)
    assert type(loss_fn.margin) is float and values(loss_fn, s, way)[0] == values(ContrastiveLoss(0.25), s, way)[0]


def test_whole_numbers_are_numbers():
    assert SupConLoss(1).temperature == 1.0 and MultiSimilarityLoss(beta=np.int64(40)).beta == 40.0


@pytest.mark.parametrize("value", ["mean", None, True, 1j, [0.5], float("nan"), float("inf"), torch.ones(2), np.ones(3)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InputError, match="margin must be"):
        ContrastiveLoss(value)
    loss_fn = ContrastiveLoss()
    with pytest.raises(InputError, match="margin must be"):
        loss_fn.margin = value
    assert loss_fn.margin == 0.5


@pytest.mark.parametrize("value", [0, 1.0, "yes", None])
def test_a_switch_takes_only_true_and_false(value):
    assert MultiSimilarityLoss(mining=np.bool_(False)).mining is False
    with pytest.raises(InputError, match="mining must be True or False"):
        MultiSimilarityLoss(mining=value)


def test_a_trained_tensor_is_refused_as_a_hyper_parameter():
    for value in (nn.Parameter(torch.tensor(0.1)), torch.tensor(0.1, requires_grad=True)):
        with pytest.raises(InputError, match="temperature must be a plain number"):
            SupConLoss(value)


class Learned(ContrastiveLoss):
    """A parameter of its own."""

    def __init__(self, **shared):
        super().__init__(**shared)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def dense(self, S, positive, negative):
        return self.scale * super().dense(S, positive, negative)


def test_a_parameter_of_a_subclass_is_differentiated_by_the_reference_and_refused_elsewhere():
    s = scene()
    for engine in ("auto", "streaming"):
        with pytest.raises(InputError, match=r'scale.*engine="reference"'):
            Learned(engine=engine)(s.anchors, s.labels, s.memory, ids=s.ids)
    loss_fn = Learned(engine="reference")
    loss = loss_fn(s.anchors, s.labels, s.memory, ids=s.ids)
    loss.backward()
    assert loss_fn.scale.grad == pytest.approx(loss.item() / 2)


def test_the_representation_names_every_hyper_parameter():
    assert repr(MultiSimilarityLoss(beta=7, mining=False)) == (
        "MultiSimilarityLoss(alpha=2.0, beta=7.0, base=0.5, epsilon=0.1, mining=False, reduction='sum', engine='auto')"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_known_by_its_name_and_takes_the_shared_arguments_by_keyword(name):
    loss_fn = LOSSES[name](reduction="mean", engine="streaming", exclude="copy")
    assert (loss_fn.name, loss_fn.reduction, loss_fn.engine, loss_fn.exclude) == (name, "mean", "streaming", "copy")
    assert loss_fn.hyperparameters and all(isinstance(getattr(loss_fn, each), float | bool) for each in loss_fn.hyperparameters)


class Relative(PairLoss):
    """Uses an extreme of the positives in `negative`, and the default `floor`."""

    name = "relative"

    def dense(self, S, positive, negative):
        lowest = S.masked_fill(~positive, torch.inf).amin(1, keepdim=True).detach().clamp(max=1.0)
        return ((1 - S) * positive).sum(1) + ((S - lowest + 1).relu() * negative).sum(1)

    def negative(self, s, p, expand):
        above = s - expand(p.lowest.clamp(max=1.0)) + 1
        return Terms(value=above.relu(), weight=(above > 0).to(s.dtype))

    def positive(self, s, n, expand):
        return Terms(value=1 - s, weight=1.0)


class RelativeContrastive(Relative, ContrastiveLoss):
    """Inherits from a loss that ignores the extremes: the statement is not inherited."""

    name = "relative_contrastive"

    def floor(self, p):
        return -torch.inf


@pytest.mark.parametrize("constants", [{}, {"SMALL": -1}, {"SMALL": -1, "MOST_LISTED": -1}])
@pytest.mark.parametrize("kind", [Relative, RelativeContrastive])
def test_a_subclass_may_use_the_extremes_of_the_positives(kind, constants, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(streaming, name, value)
    s = scene()
    (wanted, gradient), (loss, found) = (values(kind(), s, way) for way in ("reference", "streaming"))
    assert loss == pytest.approx(wanted, rel=1e-10) and torch.allclose(found, gradient, atol=1e-10)


@pytest.mark.parametrize("factor", [torch.tensor(2.5), torch.tensor([2.5])])
@pytest.mark.parametrize("constants", [{}, {"SMALL": -1, "SPARSE": -1.0}, {"SMALL": -1, "SPARSE": 1.0}])
def test_a_subclass_may_return_a_weight_of_one_element(factor, constants, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(streaming, name, value)
    s = scene()
    assert values(Scaled(factor), s)[0] == pytest.approx(values(Scaled(2.5), s)[0])


@pytest.mark.parametrize(("name", "value"), [("reduction", "avg"), ("engine", "tritn"), ("exclude", "nobody")])
def test_a_choice_is_checked_when_it_is_assigned(name, value):
    loss_fn = ContrastiveLoss()
    with pytest.raises(InputError, match=f"unknown {name}"):
        setattr(loss_fn, name, value)


def test_parameters_are_refused_where_nobody_would_differentiate_them():
    s = scene(dtype=torch.float32)
    with pytest.raises(InputError, match="scale"):
        Learned(engine="reference").with_gradient(s.anchors.detach(), s.labels, s.memory, ids=s.ids)
    memory = ShardedMemory(20, 19)
    memory.enqueue(s.anchors.detach(), s.labels, s.ids)
    with pytest.raises(InputError, match="scale"):
        GlobalLoss(Learned(engine="reference"))(s.anchors, s.labels, memory, ids=s.ids)


def test_a_replica_is_a_loss_of_its_own():
    original = ContrastiveLoss()
    assert original._replicate_for_data_parallel().handle != original.handle
