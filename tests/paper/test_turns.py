"""Steps of several configs, turn about."""

import pytest
import torch

from paper import turns
from paper.turns import Steps, in_turns
from tests.tiny import draw_photos, tiny_config


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    torch.set_num_threads(1)
    return draw_photos(tmp_path_factory.mktemp("own") / "photos")


def test_everybody_warms_up_and_then_the_order_turns(photos, tmp_path, monkeypatch):
    made = []

    class Watched(Steps):
        def seconds(self, count):
            made.append((self.job.config.memory.update, self.done, count))
            super().seconds(count)
            return float(len(made))

    monkeypatch.setattr(turns, "Steps", Watched)
    monkeypatch.setattr(turns, "TURNS", 3)
    configs = {name: tiny_config(photos, optim__iterations=8, memory__update=name) for name in ("queue", "moving_average")}
    found = in_turns(configs, tmp_path)
    assert made == [
        ("queue", 0, 2), ("moving_average", 0, 2), ("queue", 2, 2), ("moving_average", 2, 2), ("moving_average", 4, 2),
        ("queue", 4, 2), ("queue", 6, 2), ("moving_average", 6, 2),
    ]  # fmt: skip
    assert found == {"queue": [3.0, 6.0, 7.0], "moving_average": [4.0, 5.0, 8.0]}


def test_steps_train_and_their_memory_is_on_from_the_first(photos, tmp_path):
    config = tiny_config(photos, optim__iterations=4, memory__start=3, memory__fill=False)
    steps = Steps(config, tmp_path)
    before = [p.detach().clone() for p in steps.job.model.parameters()]
    assert steps.seconds(1) > 0 and steps.done == 1 and len(steps.job.memory) == config.batch.size
    assert any(not torch.equal(one, other) for one, other in zip(before, steps.job.model.parameters()))
    assert Steps(tiny_config(photos, memory__ratio=0.0), tmp_path).seconds(2) > 0


def test_looking_at_labels_is_part_of_what_a_step_takes(photos, tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("xbm_app.train.job.set_aside", lambda memory, classes: looks.append(classes))
    Steps(tiny_config(photos, memory__update="moving_average", memory__doubt="skip"), tmp_path).seconds(10)
    assert looks == [6]
