"""A step in chunks against the plain step: gradients, random numbers, types, several models, memory."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xbm.gradient_cache  # so that a module of the function's name would be noticed
from benchmarks.measure import peak_bytes
from tests.steps import close, forget, gradients, in_chunks, net, pair_loss, spread
from xbm import ContrastiveLoss, CrossBatchMemory, InputError, cached_backward

# ------------------------------------------------------------------ the plain step


@pytest.mark.parametrize("chunk", [1, 3, 4, 12, 13, 50])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_and_loss_are_those_of_the_plain_step(chunk, dropout):
    model, x = net(dropout=dropout), torch.randn(13, 7)
    torch.manual_seed(1)
    plain = spread(in_chunks(model, x, chunk))
    plain.backward()
    expected, stream = gradients(model), torch.get_rng_state()
    forget(model)
    torch.manual_seed(1)
    loss = cached_backward(model, x, spread, chunk=chunk)
    close([loss, *gradients(model)], [plain.detach(), *expected])
    assert not loss.requires_grad and torch.equal(torch.get_rng_state(), stream)


def test_it_is_exact_in_float64():
    model, x = net(dropout=0.3).double(), torch.randn(11, 7, dtype=torch.float64)
    torch.manual_seed(1)
    spread(in_chunks(model, x, 4)).backward()
    expected = gradients(model)
    forget(model)
    torch.manual_seed(1)
    cached_backward(model, x, spread, chunk=4)
    close(gradients(model), expected, 1e-14)


def test_it_computes_gradients_where_the_caller_has_disabled_them():
    model, x = net(), torch.randn(5, 7)
    spread(model(x)).backward()
    expected = gradients(model)
    forget(model)
    with torch.no_grad():
        cached_backward(model, x, spread, chunk=2)
    close(gradients(model), expected)


def test_gradients_are_added_to_those_that_are_there():
    model, x = net(), torch.randn(9, 7)
    cached_backward(model, x, spread, chunk=4)
    once = gradients(model)
    cached_backward(model, x, spread, chunk=4)
    close(gradients(model), [2 * g for g in once])


def test_the_random_numbers_of_the_loss_follow_those_of_the_forward_pass():
    """And numbers that a backward pass draws do not shift the masks of the next chunk."""

    class DrawsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, g):
            torch.rand(3)
            return g

    def noisy(v):
        return spread(v * torch.rand(len(v), 1))

    model, x = net(dropout=0.5), torch.randn(10, 7)
    torch.manual_seed(1)
    plain = noisy(in_chunks(model, x, 4))
    stream = torch.get_rng_state()
    plain.backward()
    expected = gradients(model)
    forget(model)
    torch.manual_seed(1)
    cached_backward(lambda part: DrawsInBackward.apply(model(part)), x, noisy, chunk=4)
    close(gradients(model), expected)
    assert torch.equal(torch.get_rng_state(), stream)


class Generators:
    """Stands for torch.cuda: a counter per device in place of a generator."""

    def __init__(self):
        self.drawn = {}

    def get_rng_state(self, device):
        return torch.tensor(self.drawn.get(device, 0))

    def set_rng_state(self, state, device):
        self.drawn[device] = int(state)


def test_the_generators_of_the_devices_repeat_too(monkeypatch):
    """As no such device is here: with devices that a model claims, and generators that only count."""
    generators, model, seen = Generators(), net(), []
    devices = [torch.device("cuda", 1), torch.device("mps", 0)]
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators)
    monkeypatch.setattr(xbm.gradient_cache._Part, "devices", lambda part: iter(devices))

    def draws(part):
        seen.append(tuple(int(generators.get_rng_state(device)) for device in devices))
        generators.drawn = {device: count + step for device, count, step in zip(devices, seen[-1], (1, 10))}
        return model(part)

    cached_backward(draws, torch.randn(5, 7), spread, chunk=2)
    assert seen == [(0, 0), (1, 10), (2, 20)] * 2 and list(generators.drawn.values()) == [3, 30]


def test_the_devices_are_those_of_inputs_parameters_and_buffers():
    model = nn.Linear(2, 2, device="meta")
    for run in (model, lambda x: model(x), partial(model)):
        part = xbm.gradient_cache._Part(run, {"x": torch.randn(3, 2)}, 2)
        assert {device.type for device in part.devices()} == {"cpu", "meta"}


def test_the_stream_is_restored_if_a_chunk_fails():
    calls = []

    def fails(part):
        calls.append(len(part))
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return model(part)

    model, x = net(dropout=0.5), torch.randn(10, 7)
    torch.manual_seed(1)
    in_chunks(model, x, 4)
    stream = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        cached_backward(fails, x, spread, chunk=4)
    assert torch.equal(torch.get_rng_state(), stream) and calls == [4, 4, 2, 4, 4]


# ------------------------------------------------------------------ the loss


def test_the_loss_may_enqueue_and_its_parameters_and_the_rows_of_the_memory_get_gradients():
    def step(memory, temperature, run):
        labels, ids = torch.arange(11) % 3, torch.arange(11) % 7

        def loss_of(v):
            v = F.normalize(v)
            memory.enqueue(v.detach(), labels, ids)
            return ContrastiveLoss()(v, labels, memory, ids=ids, exclude="copy") * temperature.exp()

        run(loss_of)
        return memory.rows.grad.clone(), temperature.grad.clone(), gradients(model), int(memory.clock)

    model, x = net(), torch.randn(11, 7)
    results = []
    for run in (lambda f: f(model(x)).backward(), lambda f: cached_backward(model, x, f, chunk=4)):
        forget(model)
        results.append(step(CrossBatchMemory(7, 5, "backprop"), nn.Parameter(torch.tensor(0.3)), run))
    (rows, temperature, weights, _), (our_rows, our_temperature, our_weights, clock) = results
    close([our_rows, our_temperature, *our_weights], [rows, temperature, *weights])
    assert clock == 1 and rows.abs().sum() > 0


def test_the_embeddings_are_leaves_that_no_chunk_has_a_graph_of():
    seen = []

    def loss_of(v):
        seen.append((v.is_leaf, v.requires_grad, v.grad_fn, tuple(v.shape)))
        return spread(v)

    cached_backward(net(), torch.randn(5, 7), loss_of, chunk=2)
    assert seen == [(True, True, None, (5, 5))]


@pytest.mark.parametrize("returned", [lambda v: v.sum(1), lambda v: 1.0, lambda v: (v.sum(), 3), lambda v: v.detach().sum()])
def test_a_loss_that_is_no_scalar_tensor_with_a_gradient_is_refused(returned):
    with pytest.raises(InputError, match="loss"):
        cached_backward(net(), torch.randn(4, 7), returned)


@pytest.mark.parametrize("scale", [2.0**16, 3.0])
def test_a_scaler_scales_the_gradients_and_not_the_returned_loss(scale):
    model, x = net(), torch.randn(9, 7)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loss = cached_backward(model, x, spread, chunk=4)
    expected = gradients(model)
    forget(model)
    scaled = cached_backward(model, x, spread, chunk=4, scaler=scaler)
    close([scaled, *(g / scale for g in gradients(model))], [loss, *expected])


# ------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_embeddings_keep_the_type_of_the_model(dtype):
    model, x, kinds = net(dropout=0.2), torch.randn(10, 7), []

    def loss_of(v):
        kinds.append(v.dtype)
        v.register_hook(lambda g: kinds.append(g.dtype))
        return spread(v.float())

    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        plain = loss_of(in_chunks(model, x, 4))
    plain.backward()
    expected = gradients(model)
    forget(model)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        loss = cached_backward(model, x, loss_of, chunk=4)
        assert torch.is_autocast_enabled("cpu")
    assert kinds == [dtype] * 4 and torch.equal(loss, plain.detach())
    close(gradients(model), expected, 2e-3)
    assert all(g.abs().sum() > 0 for g in gradients(model))


def test_backward_passes_run_outside_autocast():
    """Where the loss is float32 on purpose, its backward pass must not multiply in half precision."""
    model, x = net(), torch.randn(9, 7)
    other = torch.randn(6, 5)

    def loss_of(v):
        with torch.autocast("cpu", enabled=False):
            return (v.float() @ other.T).logsumexp(1).sum()

    with torch.autocast("cpu", torch.bfloat16):
        v = model(x).detach().float().requires_grad_()
    loss_of(v).backward()
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        cached_backward(
            lambda part: model(part).float(), x, lambda u: (u.register_hook(seen.append), loss_of(u))[1], chunk=9
        )  # fmt: skip
    close(seen, [v.grad])


# ------------------------------------------------------------------ several models


@pytest.mark.parametrize("same", [False, True])
def test_two_inputs_with_two_models_or_one(same):
    first = net(dropout=0.3)
    second = first if same else net(9, dropout=0.3)
    queries, documents = torch.randn(7, 7), torch.randn(12, 7)
    torch.manual_seed(1)
    plain = pair_loss(in_chunks(first, queries, 5), in_chunks(second, documents, 5))
    plain.backward()
    expected, stream = gradients(first, second), torch.get_rng_state()
    forget(first, second)
    torch.manual_seed(1)
    loss = cached_backward([first, second], (queries, documents), pair_loss, chunk=5)
    close([loss, *gradients(first, second)], [plain.detach(), *expected])
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_model_that_the_loss_does_not_use_or_that_is_frozen_keeps_its_gradients():
    used, unused, frozen = net(dropout=0.3), net(dropout=0.3), net(dropout=0.3).requires_grad_(False)
    x, calls = torch.randn(6, 7), []

    def counted(part):
        calls.append(1)
        return unused(part)

    def loss_of(u, f, v):
        return pair_loss(f, v)

    torch.manual_seed(1)
    loss_of(in_chunks(unused, x, 4), in_chunks(frozen, x, 4), in_chunks(used, x, 4)).backward()
    expected = gradients(used)
    forget(used)
    torch.manual_seed(1)
    cached_backward((counted, frozen, used), (x, x, x), loss_of, chunk=4)
    close(gradients(used), expected)
    assert all(p.grad is None for m in (unused, frozen) for p in m.parameters()) and len(calls) == 2


def test_a_frozen_model_is_fine_if_the_loss_has_parameters_and_refused_otherwise():
    model, proxies, x = net().requires_grad_(False), nn.Parameter(torch.randn(3, 5)), torch.randn(5, 7)
    cached_backward(model, x, lambda v: (v @ proxies.T).logsumexp(1).sum())
    assert proxies.grad.abs().sum() > 0
    with pytest.raises(InputError, match="requires a gradient"):
        cached_backward(model, x, spread)


def test_the_gradient_reaches_inputs_that_are_leaves():
    model, prompt = net(), torch.randn(5, 7, requires_grad=True)
    spread(model(prompt)).backward()
    expected, prompt.grad = prompt.grad, None
    cached_backward(model, prompt, spread, chunk=2)
    close([prompt.grad], [expected])
    with pytest.raises(InputError, match="detach"):
        cached_backward(model, prompt * 2, spread)


# ------------------------------------------------------------------ memory


def test_beyond_the_embeddings_and_their_gradient_memory_does_not_grow_with_the_batch():
    """Bytes that torch allocates at the same time, as its profiler counts them. The loss itself needs none here."""
    model, dim = net(64, 5, dropout=0.1), 5

    def extra(n, keep=True):
        x = torch.randn(n, 7)
        forget(model)
        cached_backward(model, x, lambda v: v.sum(), chunk=32)  # from now on, the gradients of the parameters are there

        def step():
            kept = []  # otherwise the embeddings would be gone, and leave room, while the chunks are embedded again
            cached_backward(model, x, lambda v: kept.append(v if keep else 0) or v.sum(), chunk=32)

        return peak_bytes(step) - 2 * n * dim * 4

    few, some, many = extra(512), extra(2048), extra(8192)
    assert abs(some - few) < 256 and abs(many - few) < 256, (few, some, many)
    assert few < 12 * 32 * 64 * 4, "more than the activations of a chunk"
    assert extra(8192, keep=False) < few / 2, "the embeddings should be gone before the chunks are embedded again"


def test_nor_does_that_of_a_loss_against_a_memory_beyond_three_arrays_of_embeddings():
    """The embeddings, their gradient from the loss, and the copy of it that autograd hands on."""
    dim, rows = 64, 256
    model, memory, loss_fn = net(8, dim), CrossBatchMemory(rows, dim), ContrastiveLoss()
    memory.enqueue(F.normalize(torch.randn(rows, dim)), torch.arange(rows) // 4, torch.arange(rows))

    def unit_rows(x):
        return F.normalize(model(x))

    def extra(n):
        x, labels, ids = torch.randn(n, 7), torch.arange(n) // 4, torch.arange(n) + rows
        peak = peak_bytes(lambda: cached_backward(unit_rows, x, lambda v: loss_fn(v, labels, memory, ids=ids), chunk=32))
        return peak - 3 * n * dim * 4

    few, some, many = extra(512), extra(2048), extra(8192)
    assert max(some, many) < 1.2 * few, (few, some, many)


def test_one_chunk_exists_at_a_time():
    model, outputs = net(), []

    def watched(part):
        assert all(output() is None for output in outputs)
        v = model(part)
        outputs.append(weakref.ref(v))
        return v

    cached_backward(watched, torch.randn(7, 7), spread, chunk=2)
    assert len(outputs) == 8


def test_the_function_is_not_hidden_by_a_module_of_its_name():
    assert xbm.cached_backward is xbm.gradient_cache.cached_backward is cached_backward
