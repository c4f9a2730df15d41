"""The engine and the checks as graph nodes: fake and real implementations agree, gradients are scaled and typed."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.known import NAMES
from tests.xbm.engine.pairs import pairing
from xbm import ContrastiveLoss, InputError
from xbm.checks import all_named, same_rows, sound_rows
from xbm.engine import one_pass
from xbm.losses import LOSSES
from xbm.memory import newest_copies

LIVE = []  # losses are found by handle only as long as somebody holds them


OPTIONS = {"contrastive": {"margin": -0.4}, "sup_con": {"learn_temperature": True}}


def inputs(name="contrastive", self_by="id", row_gradient=True, dtype=torch.float64, stored=None, live=0):
    """The first `live` rows are references; sup_con learns its temperature."""
    anchors, p = pairing(M=31, self_by=self_by, dtype=dtype)
    rows = p.rows[live:].to(stored or dtype).requires_grad_(row_gradient)
    references = p.rows[:live].clone().requires_grad_() if live else None
    loss_fn = LOSSES[name](**OPTIONS.get(name, {}))
    LIVE.append(loss_fn)
    tensors = (anchors.requires_grad_(), rows, references, loss_fn.log_temperature)
    tensors += (p.row_labels, p.stamps, p.labels, p.sound, p.ids, p.row_ids, p.own, None, None)
    return [*tensors, False, loss_fn.handle, False, [True, row_gradient, live > 0, name == "sup_con"], True]


@pytest.mark.parametrize("name", ["contrastive", "triplet", "sup_con"])  # a sum, ranks, a sum and a log-sum-exp
@pytest.mark.parametrize("self_by", ["id", "slot"])
@pytest.mark.parametrize("live", [0, 6])
def test_one_pass_is_a_sound_operator(name, self_by, live):
    opcheck(one_pass, inputs(name, self_by, live=live))


@pytest.mark.parametrize(
    ("dtype", "stored", "row_gradient"),
    [(torch.float32, torch.bfloat16, True), (torch.bfloat16, torch.float32, True), (torch.float32, torch.float16, False)],
)
def test_one_pass_is_a_sound_operator_for_half_anchors_and_banks(dtype, stored, row_gradient):
    opcheck(one_pass, inputs(row_gradient=row_gradient, dtype=dtype, stored=stored))


@pytest.mark.parametrize("laid_out", ["rows", "columns"])
@pytest.mark.parametrize("row_gradient", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fake_outputs_have_the_shape_type_and_strides_of_the_real_ones(name, row_gradient, laid_out):
    given = inputs(name, row_gradient=row_gradient, dtype=torch.float32, stored=torch.bfloat16, live=6 * (laid_out == "rows"))
    if laid_out == "columns":
        given[0] = given[0].detach().T.contiguous().T.requires_grad_()
    with FakeTensorMode() as mode:
        fake = one_pass(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given])
    real = one_pass(*given)
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def test_the_checks_and_look_ups_are_sound_operators():
    v, ids = F.normalize(torch.randn(5, 7)), torch.tensor([4, 2, 9, 2, 0])
    keep, everyone = torch.tensor([True, True, False, True, True]), torch.ones(5, dtype=torch.bool)
    opcheck(sound_rows, (v, keep, ids, 10))
    opcheck(sound_rows, (v, keep, None, 0))
    row_ids, stamps = torch.tensor([2, 4, -1, 2, 7, 2]), torch.tensor([5, 1, -1, 3, 3, 2])
    opcheck(newest_copies, (ids, row_ids, stamps, torch.tensor(1)))
    rows, labels = torch.cat([torch.randn(2, 7), v]), torch.arange(5)
    row_labels = torch.cat([labels[:2], labels])
    opcheck(same_rows, (v, labels, rows, row_labels, torch.arange(2, 7), torch.tensor(5)))
    opcheck(all_named, (row_ids, stamps, everyone))


@pytest.mark.parametrize("name", NAMES)
def test_backward_scales_both_gradients_by_what_comes_from_above(name):
    given = inputs(name)
    out = one_pass(*given)
    (out[0] * -2.5).backward()
    assert torch.allclose(given[0].grad, -2.5 * out[1]) and torch.allclose(given[1].grad, -2.5 * out[2])
    assert given[0].grad.abs().max() > 0 and given[1].grad.abs().max() > 0


def test_gradients_have_the_types_of_what_they_belong_to():
    given = inputs(dtype=torch.float32, stored=torch.bfloat16)
    one_pass(*given)[0].backward()
    assert given[0].grad.dtype == torch.float32 and given[1].grad.dtype == torch.bfloat16


def test_no_output_shares_memory_with_an_input_or_another():
    given = inputs(row_gradient=False)
    out = [x for x in one_pass(*given) if x.numel()]
    places = [x.data_ptr() for x in out] + [x.data_ptr() for x in given if isinstance(x, torch.Tensor)]
    assert len(set(places)) == len(places)


def test_a_second_derivative_is_refused_in_one_sentence():
    given = inputs()
    with pytest.raises(InputError, match='engine="reference"'):
        torch.autograd.grad(one_pass(*given)[0], given[0], create_graph=True)


def test_a_step_compiles_at_its_first_call_without_an_eager_one_before():
    """Nothing may be prepared in an eager call: whoever compiles at once would meet it as a graph break."""
    loss_fn = ContrastiveLoss(margin=-0.4)
    labels = torch.arange(5) % 2
    step = torch.compile(lambda x: loss_fn(F.normalize(x, dim=0).T, labels), fullgraph=True, backend="aot_eager")
    x = torch.randn(7, 5, requires_grad=True)
    compiled = step(x)
    assert torch.allclose(compiled, loss_fn(F.normalize(x, dim=0).T, labels))
    loss_fn.margin = 0.1
    assert torch.allclose(step(x), loss_fn(F.normalize(x, dim=0).T, labels)) and not torch.allclose(step(x), compiled)
