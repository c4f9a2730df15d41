"""The slow copy of a model against plain Python numbers, and what users do to it: save, wrap, move, cast, copy."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.worlds import on_ranks
from xbm import InputError, MomentumEncoder


def net(dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def train(model):
    """Stands for a step of the optimizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, dtype=torch.float64).to(parameter)


def saved_and_loaded(keys):
    file = io.BytesIO()
    torch.save(keys.state_dict(), file)
    file.seek(0)
    twin = MomentumEncoder(keys.model, keys.momentum)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------ numbers


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(st.tuples(st.floats(0, 0.9999), st.booleans(), st.integers(0, 2)), max_size=8),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_it_holds_what_plain_numbers_hold(plan, dtype):
    """Any momentum before each update, any number of steps between updates, saved and loaded anywhere."""
    torch.manual_seed(len(plan))
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2)).to(dtype)
    keys = MomentumEncoder(model)
    slow = [p.flatten().tolist() for p in model.parameters()]
    for momentum, reload, steps in plan:
        for _ in range(steps):
            train(model)
        keys.momentum = momentum
        keys.update()
        for values, parameter in zip(slow, model.parameters()):
            values[:] = [momentum * old + (1 - momentum) * new for old, new in zip(values, parameter.flatten().tolist())]
        if reload:
            keys = saved_and_loaded(keys)
    exact = {name.replace("/", "."): values for name, values in keys.masters.named_buffers()}
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for values, (name, parameter) in zip(slow, keys.encoder.named_parameters()):
        wide = exact.get(name, parameter)
        found, expected = wide.double().flatten(), torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert parameter.dtype == dtype and torch.equal(wide.to(dtype), parameter)
    assert bool(exact) == (dtype.itemsize < 4)


def test_it_goes_on_exactly_where_it_was_saved():
    for dtype in (torch.float32, torch.bfloat16):
        model = net(dtype)
        keys = MomentumEncoder(model, 0.9)
        for _ in range(3):
            train(model)
            keys.update()
        other = saved_and_loaded(keys)
        for _ in range(3):
            train(model)
            keys.update()
            other.update()
            assert same(keys, other)


def test_in_half_precision_small_updates_add_up():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    keys = MomentumEncoder(model, 0.999)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(1000):
        keys.update()
    assert abs(keys.encoder.weight.item() - (2 - 0.999**1000)) < 2**-8


def test_momentum_0_copies_and_equal_weights_stay_equal():
    model = net()
    keys = MomentumEncoder(model, 0.3)
    keys.update()
    assert all(torch.equal(a, b) for a, b in zip(keys.encoder.parameters(), model.parameters()))
    train(model)
    keys.momentum = 0
    keys.update()
    assert all(torch.equal(a, b) for a, b in zip(keys.encoder.parameters(), model.parameters()))


@pytest.mark.parametrize("momentum", [1, 1.0, -0.1, float("nan"), "0.9", None, True, torch.tensor(0.5)])
def test_a_momentum_out_of_range_is_refused_at_any_time(momentum):
    with pytest.raises(InputError, match="0 ≤ m < 1"):
        MomentumEncoder(nn.Linear(2, 2), momentum)
    keys = MomentumEncoder(nn.Linear(2, 2), 0.5)
    with pytest.raises(InputError, match="0 ≤ m < 1"):
        keys.momentum = momentum
    assert keys.momentum == 0.5 and "momentum=0.5" in repr(keys)


# ------------------------------------------------------------------ a module among modules


def test_it_embeds_without_a_graph_and_trains_nothing():
    model = net()
    keys = MomentumEncoder(model)
    x = torch.randn(5, 3, requires_grad=True)
    assert not keys(x).requires_grad and not any(p.requires_grad for p in keys.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(keys(input=x), keys(x))


def test_the_model_is_no_part_of_it():
    model = net()
    keys = MomentumEncoder(model)
    assert set(keys.state_dict()) == {f"encoder.{name}" for name in model.state_dict()}
    assert len(list(keys.parameters())) == len(list(model.parameters())) and model not in list(keys.modules())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in keys.parameters()}


def test_the_copy_has_a_mode_of_its_own():
    model = net().eval()
    model[1].train()
    keys = MomentumEncoder(model)
    assert [m.training for m in keys.modules() if m is not keys.masters] == [False, False, False, True, False]
    keys.train()
    assert keys.encoder[0].training and not model[0].training
    keys.eval()
    assert not keys.encoder[1].training and model[1].training


def test_buffers_are_copied_and_those_that_do_not_fit_are_left_alone():
    model = net()
    model.register_buffer("cache", torch.zeros(2))
    keys = MomentumEncoder(model, 0.9)
    model.cache = torch.ones(3)
    model.register_buffer("new", torch.ones(1))
    for _ in range(3):
        model(torch.randn(9, 3))
    keys.update()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(keys.encoder[1].get_buffer(name), model[1].get_buffer(name)), name
    assert keys.encoder[1].num_batches_tracked == 3 and keys.encoder.cache.tolist() == [0, 0]


def test_tied_parameters_stay_tied_and_move_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

    model = Tied()
    keys = MomentumEncoder(model, 0.5)
    before = model.first.weight.detach().clone()
    train(model)
    keys.update()
    assert keys.encoder.first.weight is keys.encoder.second.weight
    torch.testing.assert_close(keys.encoder.first.weight, (before + model.first.weight) / 2)


def test_integer_parameters_are_copied():
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    keys = MomentumEncoder(model, 0.9)
    model.codes += 5
    keys.update()
    assert keys.encoder.codes.tolist() == [6, 7]


def test_a_model_that_has_changed_is_refused():
    model = net()
    keys = MomentumEncoder(model)
    model[0] = nn.Linear(3, 5)
    with pytest.raises(InputError, match="new MomentumEncoder"):
        keys.update()
    with pytest.raises(InputError, match="first"):
        MomentumEncoder(nn.LazyLinear(3))
    with pytest.raises(InputError, match="Module"):
        MomentumEncoder(lambda x: x)


# ------------------------------------------------------------------ moves, casts, copies, wrappers


def test_it_may_be_cast_after_construction_without_losing_its_masters():
    model = net(torch.bfloat16)
    keys = MomentumEncoder(model, 0.9)
    train(model)
    keys.update()
    masters = {name: values.clone() for name, values in keys.masters.named_buffers()}
    assert len(masters) == 6
    keys.half()
    assert all(torch.equal(values, masters[name]) for name, values in keys.masters.named_buffers())
    assert all(p.dtype == torch.float16 for p in keys.encoder.parameters())
    keys.float()
    assert not list(keys.masters.buffers())
    assert all(torch.equal(p, masters[n.replace(".", "/")]) for n, p in keys.encoder.named_parameters())
    keys.bfloat16()
    assert len(list(keys.masters.buffers())) == 6
    model.float()  # mixed types meet in those of the copy
    train(model)
    keys.update()
    expected = 0.9 * masters["0/weight"] + 0.1 * model[0].weight
    torch.testing.assert_close(keys.masters.get_buffer("0/weight"), expected, rtol=1e-2, atol=1e-2)


def test_parameters_that_were_moved_or_replaced_are_followed():
    model = net()
    keys = MomentumEncoder(model, 0.5)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64)  # new parameter objects
        keys.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    before = keys.encoder[0].weight.clone()
    train(model)
    keys.update()
    torch.testing.assert_close(keys.encoder[0].weight, (before + model[0].weight) / 2)
    assert not any(p.requires_grad for p in keys.parameters())


def test_a_model_on_another_device_is_refused():
    model = net()
    keys = MomentumEncoder(model)
    model.to("meta")
    with pytest.raises(InputError, match=r"\.to\('meta'\)"):
        keys.update()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("first", [0, 1])
def test_copies_of_a_container_stay_connected(copied, first):
    model = net(torch.bfloat16)
    keys = MomentumEncoder(model, 0.5)
    train(model)
    keys.update()
    pair = [model, keys][:: 1 if first == 0 else -1]
    twins = copied(pair)
    model_twin, keys_twin = twins[:: 1 if first == 0 else -1]
    assert keys_twin.model is model_twin and keys_twin.momentum == 0.5 and same(keys, keys_twin)
    before = keys.encoder[0].weight.clone()
    train(model_twin)
    keys_twin.update()
    assert torch.equal(keys.encoder[0].weight, before) and not torch.equal(keys_twin.encoder[0].weight, before)


def test_a_copy_alone_has_a_model_of_its_own():
    keys = MomentumEncoder(net())
    twin = copy.deepcopy(keys)
    assert twin.model is not keys.model and same(twin, keys)


def test_a_compiled_model_is_unwrapped():
    model = net()
    keys = MomentumEncoder(torch.compile(model), 0.5)
    assert keys.model is model and type(keys.encoder) is nn.Sequential


def wrapped():
    torch.manual_seed(0)
    model = net()
    replica = nn.parallel.DistributedDataParallel(model)
    keys = MomentumEncoder(torch.compile(replica), 0.5)
    assert keys.model is model
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    torch.manual_seed(dist_rank := torch.distributed.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        replica(torch.randn(5, 3) + dist_rank).square().mean().backward()
        optimizer.step()
        keys.update()
    return {name: value for name, value in keys.state_dict().items() if "running" not in name}


@pytest.mark.slow
def test_on_several_ranks_the_copies_are_the_same():
    first, second = on_ranks(2, wrapped)
    assert all(torch.equal(first[name], second[name]) for name in first)
