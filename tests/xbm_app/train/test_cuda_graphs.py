"""Recorded steps without a GPU: the recording is played by running the step, everything around it is real."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import differences, tiny_config
from xbm_app.train import cuda_graphs, loop
from xbm_app.train.cuda_graphs import Replayed
from xbm_app.train.loop import train
from xbm_app.train.state import RunState


class Played(cuda_graphs.RecordedStep):
    """Where a GPU would replay kernels, this runs the step again on the same static inputs."""

    def _load(self, ids):
        self.ids.copy_(torch.from_numpy(ids))

    def _on_stream(self, call):
        return call()

    def _record(self, step):
        def replay():
            self.anchors.copy_(self._step(-1))

        self.anchors = torch.zeros(self.size, self.run.config.model.dim)
        self.graph = SimpleNamespace(replay=replay)
        self.recorded = [*getattr(self, "recorded", []), (step, self.with_memory)]


@pytest.fixture
def played(monkeypatch):
    made = []

    def play(*arguments):
        made.append(Played(*arguments))
        return made[-1]

    monkeypatch.setattr(loop, "why_not", lambda run: None)
    monkeypatch.setattr(loop, "RecordedStep", play)
    return made


CASES = {
    "queue": {},
    "no memory": {"memory__ratio": 0},
    "times three": {"memory__updates_per_step": 3, "batch__accumulate": 2},
    "moving average": {"memory__update": "moving_average"},
    "doubt": {"memory__update": "moving_average", "memory__doubt": "skip", "data__noise": 0.2},
    "shuffled": {"batch__sampler": "shuffle", "batch__size": 10},
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_see_the_same_data_and_end_with_the_same_bits(case, photos, tmp_path, played, monkeypatch):
    config = tiny_config(photos, data__feed="resident", **CASES[case])
    train(config, tmp_path / "recorded", quiet=True)
    expected = [(3, False), (7, True)] if case != "no memory" else [(3, False)]
    assert played[0].recorded == expected
    monkeypatch.undo()
    train(config, tmp_path / "plain", quiet=True)
    assert differences(tmp_path / "recorded", tmp_path / "plain") == []


class Fails(Played):
    """A recording that runs out of memory after its backward pass: gradients are there that nobody computed."""

    recording = False
    _record = cuda_graphs.RecordedStep._record

    def _step(self, step):
        if not Fails.recording:
            return super()._step(step)
        rows = self.run.memory.rows
        for each in [*self.run.model.parameters(), *([rows] if rows.requires_grad else [])]:
            each.grad = torch.full_like(each, 1e6)
        raise RuntimeError("out of memory")


@contextmanager
def recording(*_, **__):
    Fails.recording = True
    try:
        yield
    finally:
        Fails.recording = False


@pytest.mark.parametrize("update", ["queue", "backprop"])
def test_a_recording_that_fails_leaves_nothing_behind(update, photos, tmp_path, monkeypatch):
    config = tiny_config(photos, data__feed="resident", memory__update=update, memory__start=0, memory__batch_weight=1.0)
    train(config, tmp_path / "plain", quiet=True)
    monkeypatch.setattr(loop, "why_not", lambda run: None)
    monkeypatch.setattr(loop, "RecordedStep", Fails)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for name in ("CUDAGraph", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    train(config, tmp_path / "failed", quiet=True)
    assert differences(tmp_path / "failed", tmp_path / "plain") == []


def test_who_cannot_be_recorded_is_told(photos, tmp_path):
    def asked(**changes):
        config = tiny_config(photos, **changes)
        run = RunState(config, loop.begin_run(config, tmp_path / str(len(changes)) / "run"), tmp_path)
        given = run.device
        run.device = torch.device("cuda")
        return given, cuda_graphs.why_not(run), run

    given, reason, run = asked(data__feed="decode")
    assert "not on the device" in reason
    run.device = given
    assert "only a GPU" in cuda_graphs.why_not(run)
    _, reason, run = asked(data__feed="resident", seed=3)
    assert reason is None
    run.scaler = SimpleNamespace(is_enabled=lambda: True)
    assert "float16" in cuda_graphs.why_not(run)
    _, reason, _ = asked(data__feed="resident", memory__ratio=0.0, loss__name="pml/ProxyAnchorLoss")
    assert "lists its pairs on the host" in reason
    run.ranks = SimpleNamespace(world=2)
    assert "2 processes" in cuda_graphs.why_not(run) and "batch norm over all of them is not fused" in cuda_graphs.why_not(run)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_recorded_run_learns_what_a_plain_one_learns(photos, tmp_path, monkeypatch):
    changes = {"device": "cuda", "data__feed": "resident", "optim__precision": "fp32", "optim__iterations": 40}
    recorded = train(tiny_config(photos, **changes), tmp_path / "recorded", quiet=True)
    monkeypatch.setattr(loop, "why_not", lambda run: "not now")
    plain = train(tiny_config(photos, **changes), tmp_path / "plain", quiet=True)
    assert abs(recorded["recall@1"] - plain["recall@1"]) < 0.1


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
    for _ in range(cuda_graphs.EAGER_PASSES + 3):
        for count in (4, 7):
            images = torch.randn(count, 3, 8, 8, device="cuda")
            assert torch.allclose(replayed(images), model(images), atol=1e-5)
    assert len(replayed.recorded) == 2 and not torch.equal(model[1].running_mean, before)
