"""Recorded forward passes: on a CPU the model itself; what is recorded and when is told by a stand-in for the graph."""

import pytest
import torch

from xbm_app.train import replay
from xbm_app.train.replay import Replayed


def test_on_a_cpu_it_is_the_model():
    model = torch.nn.Linear(3, 2)
    images = torch.randn(4, 3)
    replayed = Replayed(model)
    for _ in range(5):
        assert torch.equal(replayed(images), model(images))
    assert not replayed.recorded and dict(replayed.named_buffers()) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_on_a_gpu_each_shape_is_recorded_after_its_first_passes():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5)).cuda()
    replayed, before = Replayed(model), model[1].running_mean.clone()
    for _ in range(replay.PLAIN + 3):
        for count in (4, 7):
            images = torch.randn(count, 3, 8, 8, device="cuda")
            assert torch.allclose(replayed(images), model(images), atol=1e-5)
    assert len(replayed.recorded) == 2 and not torch.equal(model[1].running_mean, before)
