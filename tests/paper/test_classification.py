from types import SimpleNamespace

import pytest
import torch

from paper import classification
from paper.classification import LOSS, Pooled, classify
from tests.tiny import draw_photos, tiny_config


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    torch.set_num_threads(1)
    return draw_photos(tmp_path_factory.mktemp("own") / "photos")


def config(photos, **more):
    settings = {"loss__name": LOSS, "memory__ratio": 0.0, "log__every": 10, "optim__iterations": 60, "optim__lr": 3e-3}
    return tiny_config(photos, **{**settings, "optim__decay_at": (50,), "log__checkpoint_every": 20, **more})


def test_it_learns_the_classes_and_watches_the_pooled_features(photos, tmp_path):
    found = classify(config(photos), tmp_path / "run")
    curves = found["curves"]
    assert curves["step"] == [9, 19, 29, 39, 49, 59] and curves["lr"][-1] == pytest.approx(3e-4)
    assert curves["accuracy"][-1] > 0.8 > curves["accuracy"][0] and curves["loss"][-1] < curves["loss"][0]
    assert curves["drift_10"][0] is None and all(value > 0 for value in curves["drift_10"][1:])
    assert curves["drift_10"][-1] < curves["drift_10"][1] and found["data"]["train_classes"] == 6 and found["scores"] == {}


def test_drift_is_that_of_the_models_of_then_and_now(photos, tmp_path):
    """Trained to 20 and to 30 iterations: the distance of their pooled features is what the longer run says of iteration 30."""
    seen = []

    class Kept(Pooled):
        def forward(self, images):
            seen.append(super().forward(images))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "Pooled", Kept)
        curves = classify(config(photos, optim__iterations=30), tmp_path / "run")["curves"]
    wanted = (seen[-1] - seen[-2]).square().sum(1).mean()
    assert curves["drift_10"][-1] == pytest.approx(float(wanted), rel=1e-3)
    assert torch.allclose(seen[-1].norm(dim=1), torch.ones(len(seen[-1])), atol=1e-5)


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(photos, tmp_path, monkeypatch):
    whole = classify(config(photos), tmp_path / "whole")
    calls = 0

    def cross_entropy(*words):
        nonlocal calls
        calls += 1
        if calls == 33:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(*words)

    monkeypatch.setattr(classification, "F", SimpleNamespace(cross_entropy=cross_entropy))
    with pytest.raises(KeyboardInterrupt):
        classify(config(photos), tmp_path / "run")
    monkeypatch.undo()
    assert classify(config(photos), tmp_path / "run") == whole
