"""Branches beside each other: in order, each on a stream of its own, and none that is not waited for."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from xbm_app.models import fused
from xbm_app.models.fused import in_parallel

BRANCHES = [lambda x: x + 1, lambda x: x * 2, lambda x: x - 3]


def test_outside_a_graph_they_run_one_after_the_other():
    x = torch.arange(4.0)
    assert [y.tolist() for y in in_parallel(BRANCHES, x)] == [f(x).tolist() for f in BRANCHES]


class Stream:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


class Seen(torch.Tensor):
    """As on a GPU, as far as `in_parallel` looks."""

    is_cuda = True
    events: list = []  # noqa: RUF012

    def record_stream(self, stream):
        self.events.append(f"kept for {stream.name}")


def test_inside_a_graph_every_stream_waits_and_is_waited_for(monkeypatch):
    events = Seen.events = []
    main = Stream("main", events)
    current = [main]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    fake = SimpleNamespace(
        is_current_stream_capturing=lambda: True, current_stream=lambda device: main, stream=on, Stream=lambda device: None
    )
    monkeypatch.setattr(fused.torch, "cuda", fake)
    monkeypatch.setattr(fused, "_streams", lambda device, count: [Stream(f"side {k}", events) for k in range(count)])

    def noted(k):
        def branch(x):
            events.append(f"{k} on {current[-1].name}")
            return BRANCHES[k](x)

        return branch

    x = torch.arange(4.0).as_subclass(Seen)
    made = in_parallel([noted(k) for k in range(3)], x)
    assert [y.tolist() for y in made] == [f(torch.arange(4.0)).tolist() for f in BRANCHES]
    assert events == [
        "side 0 waits for main", "kept for side 0", "1 on side 0",
        "side 1 waits for main", "kept for side 1", "2 on side 1",
        "0 on main",
        "main waits for side 0", "kept for main", "main waits for side 1", "kept for main",
    ]  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_recorded_block_gives_the_same_gradients():
    from xbm_app.models import build_model
    from xbm_app.models.fused import fuse

    model = fuse(build_model("googlenet", dim=16, weights="none")).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)

    def step():
        model.zero_grad(set_to_none=True)
        model(images)[:, 0].sum().backward()

    step()
    plain = [p.grad.clone() for p in model.parameters()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    whole = sum(p.square().sum() for p in plain).sqrt()
    assert sum((a.grad - b).square().sum() for a, b in zip(model.parameters(), plain)).sqrt() < 1e-2 * whole
