import pytest
import torch
from torch import nn

from xbm_app.train.metrics import Drift


class Mover(nn.Module):
    """f(x; t) = x · t / 64, exact in float32, with a note of when it was asked and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.calls = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.t, self.training))
        return x * (self.t / 64)


def measure(drift: Drift, model: Mover, start: int, stop: int) -> dict[int, dict[int, float]]:
    found = {}
    for model.t in range(start, stop):
        if values := drift(model.t, model):
            found[model.t] = {step: float(value) for step, value in values.items()}
    return found


IMAGES = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])  # squared lengths 25, 1, 100: their mean is 42


@pytest.mark.parametrize("every", [1, 10, 15, 20, 25, 50, 100])
def test_drift_is_the_mean_squared_distance_to_the_model_that_many_steps_ago(every):
    found = measure(Drift(IMAGES, dim=2, every=every, steps=(10, 30, 100)), Mover(), 0, 230)
    assert list(found) == [t for t in range(every, 230, every) if t >= 10]
    for t, values in found.items():
        assert values == pytest.approx({step: 42 * (step / 64) ** 2 for step in (10, 30, 100) if step <= t}), t


def test_the_model_is_asked_only_when_needed_and_left_in_its_mode():
    model = Mover().train()
    measure(Drift(IMAGES, dim=2, every=50, steps=(10,)), model, 0, 101)
    assert model.calls == [(t, False) for t in (0, 40, 50, 90, 100)] and model.training
    measure(Drift(IMAGES, dim=2, every=50, steps=(10,)), model.eval(), 0, 1)
    assert not model.training


@pytest.mark.parametrize("stop", [1, 41, 50, 51, 99, 120])
def test_a_resumed_one_goes_on_as_if_nothing_had_happened(stop):
    whole = measure(Drift(IMAGES, 2, every=50, steps=(10, 100)), Mover(), 0, 300)
    before, after = (Drift(IMAGES, 2, every=50, steps=(10, 100)) for _ in range(2))
    found = measure(before, Mover(), 0, stop)
    after.load_state_dict(before.state_dict())
    assert found | measure(after, Mover(), stop, 300) == whole


def test_what_was_not_seen_is_not_told():
    """Begun at iteration 60, there is nothing of iteration 0 to compare with."""
    found = measure(Drift(IMAGES, 2, every=50, steps=(10, 100)), Mover(), 60, 201)
    assert list(found[100]) == [10] and list(found[150]) == [10] and list(found[200]) == [10, 100]


def test_no_images_no_drift():
    assert measure(Drift(IMAGES[:0], 2, every=10, steps=(10,)), Mover(), 0, 50) == {}


def test_the_images_are_not_part_of_the_state():
    assert set(Drift(IMAGES, 2).state_dict()) == {"past", "taken"}
