"""After a backward pass all ranks have the mean gradient and nothing else has changed."""

import torch
from torch import nn

from tests.worlds import on_ranks
from xbm.distributed import Ranks
from xbm_app.train.share import share_gradients


def shared() -> dict[str, torch.Tensor]:
    ranks = Ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    x = torch.randn(6, 3)[3 * ranks.rank : 3 * ranks.rank + 3]
    model(x).square().sum().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    share_gradients(model, ranks)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"alone": alone, "shared": found}


def test_gradients_are_means_over_the_ranks():
    one, other = on_ranks(2, shared)
    assert one["shared"].keys() == one["alone"].keys() and "2.bias" not in one["shared"]
    for name, value in one["shared"].items():
        assert torch.equal(value, other["shared"][name]), name
        torch.testing.assert_close(value, (one["alone"][name] + other["alone"][name]) / 2)


def test_one_process_keeps_its_own():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad
    share_gradients(model, Ranks())
    assert model.weight.grad is before
