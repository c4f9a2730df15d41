"""Steps in chunks in DistributedDataParallel: one reduction, and the gradient of the plain step on the global batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.steps import close, gradients, net, pair_loss, spread
from tests.worlds import on_ranks
from xbm import ContrastiveLoss, CrossBatchMemory, InputError, cached_backward
from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory


class Tempered(nn.Module):
    """A model with a parameter that only the loss uses."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.temperature = net(dropout=dropout), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        return self.net(x)


def reduced(calls, bucket):
    calls.append(bucket.index())
    return allreduce_hook(None, bucket)


def counted(module, **options):
    """A replica, and a list that grows with each reduction."""
    replica, calls = DistributedDataParallel(module, **options), []
    replica.register_comm_hook(calls, reduced)
    return replica, calls


def batch():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(13, 7, generator=draw), torch.arange(13) % 4, torch.arange(13)


def replicated(steps, cut, options):
    """Each rank has its own rows, in chunks of 2, and with the temperature of the model in the loss."""
    torch.manual_seed(0)
    module, ranks = Tempered(), Ranks()
    model, count = counted(module, **options)
    loss_fn, memory = GlobalLoss(ContrastiveLoss()), ReplicatedMemory(17, 5)
    inputs, labels, ids = (x[:cut] if ranks.rank == 0 else x[cut:] for x in batch())

    def loss_of(v):
        v = F.normalize(v)
        memory.enqueue(v.detach(), labels, ids)
        return loss_fn(v, labels, memory, ids=ids, exclude="copy") + module.temperature.exp() * (1 + ranks.rank)

    results = []
    for _ in range(steps):
        model.zero_grad()
        loss = cached_backward(lambda part: model(part), inputs, loss_of, chunk=2)
        results.append((loss, gradients(module), len(count)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
    return results


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_replicas_reduce_once_and_have_the_gradient_of_the_global_batch(options):
    torch.manual_seed(0)
    model, memory, loss_fn = Tempered(), CrossBatchMemory(17, 5), ContrastiveLoss()
    inputs, labels, ids = batch()
    expected = []
    for _ in range(3):
        model.zero_grad()
        v = F.normalize(model(inputs))
        memory.enqueue(v.detach(), labels, ids)
        loss = loss_fn(v, labels, memory, ids=ids, exclude="copy") + model.temperature.exp() * 1.5
        loss.backward()
        expected.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    for rank in on_ranks(2, replicated, 3, 4, options):
        for step, (_, found, calls) in enumerate(rank):
            close(found, expected[step])
            assert calls == step + 1


def twice(same):
    """One replica for two inputs, or two; the second input decides where a shared one reduces."""
    torch.manual_seed(0)
    first, calls = counted(net().double())
    second, other = (first, []) if same else counted(net().double())
    plain = copy.deepcopy((first.module, second.module))
    torch.manual_seed(5 + dist.get_rank())
    queries, documents = torch.randn(5, 7).double(), torch.randn(9, 7).double()
    pair_loss(plain[0](queries), plain[1](documents)).backward()
    cached_backward((first, second), (queries, documents), pair_loss, chunk=2)
    return gradients(*plain), gradients(first.module, second.module), len(calls), len(other)


@pytest.mark.parametrize("same", [False, True])
def test_a_replica_with_two_inputs_reduces_once(same):
    ranks = on_ranks(2, twice, same)
    expected = [sum(each) / 2 for each in zip(*(rank[0] for rank in ranks))]
    for _, found, calls, other in ranks:
        close(found, expected)
        assert (calls, other) == ((1, 0) if same else (1, 1))


def sometimes_unused():
    """On rank 1, the loss does not depend on the embeddings; the other rank reduces all the same."""
    torch.manual_seed(0)
    model, count = counted(Tempered())
    temperature = model.module.temperature
    x = torch.ones(5, 7)
    cached_backward(model, x, (lambda v: v.sum() + temperature) if dist.get_rank() == 0 else lambda v: temperature * 2, chunk=2)
    return gradients(model.module), len(count)


def test_a_rank_whose_loss_does_not_use_the_embeddings_reduces_too():
    torch.manual_seed(0)
    model = Tempered()
    (model(torch.ones(5, 7)).sum() / 2 + 1.5 * model.temperature).backward()
    for found, calls in on_ranks(2, sometimes_unused):
        close(found, gradients(model))
        assert calls == 1


def frozen_but_for_the_temperature():
    module = Tempered()
    module.net.requires_grad_(False)
    model, calls = counted(module)
    temperature = module.temperature
    cached_backward(model, torch.ones(5, 7), lambda v: v.sum() + (1 + dist.get_rank()) * temperature, chunk=2)
    return temperature.grad, len(calls)


def test_a_parameter_that_only_the_loss_uses_is_reduced_though_the_rest_is_frozen():
    assert on_ranks(2, frozen_but_for_the_temperature) == [(1.5, 1)] * 2


def used_in_the_loss():
    """The loss calls the replica too, with other inputs."""
    torch.manual_seed(0)
    model, calls = counted(net())
    x = torch.ones(5, 7) + dist.get_rank()
    cached_backward(model, x, lambda v: spread(v) + model(2 * x).square().sum(), chunk=2)
    return gradients(model.module), len(calls)


def test_a_replica_that_the_loss_calls_too_reduces_once():
    torch.manual_seed(0)
    model = net()
    for x in (torch.ones(5, 7), torch.ones(5, 7) + 1):
        (spread(model(x)) / 2 + model(2 * x).square().sum() / 2).backward()
    for found, calls in on_ranks(2, used_in_the_loss):
        close(found, gradients(model), 1e-5)
        assert calls == 1


def static():
    model = DistributedDataParallel(net(), static_graph=True)
    with pytest.raises(InputError, match="static_graph"):
        cached_backward(model, torch.ones(5, 7), spread)


def test_a_static_graph_is_refused():
    on_ranks(1, static)
