"""Batch normalisation over the ranks' images is that of one process with all of them: value, gradient, statistics."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.worlds import on_ranks
from xbm.distributed import Ranks
from xbm_app.models.embedding import synchronise

SIZES = (3, 1, 4)


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 4), nn.BatchNorm1d(4))
    return model.double()


def images() -> torch.Tensor:
    return torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def played() -> dict[str, Any]:
    ranks, model = Ranks(), net()
    if ranks.world > 1:
        synchronise(model, ranks)
    x = images().split(SIZES)[ranks.rank] if ranks.world > 1 else images()
    x.requires_grad_()
    y = model(x)
    (y**3).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = {"y": y.detach(), "x": x.grad, "eval": model.eval()(images()).detach(), "gradients": gradients}
    return {**found, **model.state_dict()}


def test_three_ranks_normalise_as_one():
    alone, ranks = played(), on_ranks(3, played)
    assert all(found.keys() == alone.keys() for found in ranks)
    for name in ("y", "x"):
        torch.testing.assert_close(torch.cat([found[name] for found in ranks]), alone[name])
    for name in ("0.weight", "1.bias", "1.weight", "4.bias", "5.weight"):
        total = sum(found["gradients"][name] for found in ranks)
        torch.testing.assert_close(total, alone["gradients"][name], msg=lambda m, n=name: f"{n}: {m}")
    for name in ("1.running_mean", "1.running_var", "5.running_var", "5.num_batches_tracked", "eval"):
        for found in ranks:
            torch.testing.assert_close(found[name], alone[name])
            assert torch.equal(found[name], ranks[0][name])


def test_one_that_also_activates_is_known():
    timm = pytest.importorskip("timm.layers.norm_act")
    torch.manual_seed(0)
    norm = timm.BatchNormAct2d(3)
    x = torch.randn(4, 3, 2, 2)
    expected = norm(x)
    norm.reset_running_stats()
    synchronise(norm, Ranks())
    torch.testing.assert_close(norm(x), expected)
    assert (expected >= 0).all()
