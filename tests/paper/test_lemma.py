"""Lemma 1's parts against a Jacobian that is written out."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from paper.lemma import embedding_of, gradient_errors, largest_singular_value_squared
from xbm_app.models import build_model


class Net(nn.Module):
    """A little of everything a trunk has, in float64: a convolution, batch norm, a bend, a head, the unit sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.head(self.body(x).mean((2, 3))))


@pytest.fixture
def scene():
    model = Net().double()
    model(torch.randn(8, 2, 6, 6, dtype=torch.float64))  # statistics worth having
    model.eval()
    image = torch.randn(2, 6, 6, dtype=torch.float64)
    f, weights = embedding_of(model, image)
    parts = jacrev(lambda at: functional_call(model, {**at, **dict(model.named_buffers())}, (image[None],))[0])(weights)
    J = torch.cat([part.reshape(5, -1) for part in parts.values()], dim=1)  # (D, weights)
    return f, weights, J


def test_power_iteration_finds_the_largest_singular_value_of_the_dense_jacobian(scene):
    f, weights, J = scene
    wanted = torch.linalg.svdvals(J)[0].square().item()
    assert largest_singular_value_squared(f, weights, most=500, tolerance=1e-10) == pytest.approx(wanted, rel=1e-6)
    loose = largest_singular_value_squared(f, weights)
    assert loose <= wanted * (1 + 1e-9) and loose == pytest.approx(wanted, rel=1e-2)  # from below


def test_a_few_rounds_stay_below(scene):
    f, weights, J = scene
    one = largest_singular_value_squared(f, weights, most=1)
    assert 0 < one <= torch.linalg.svdvals(J)[0].square().item()


def test_a_gradients_error_is_that_of_the_dense_jacobian(scene):
    f, weights, J = scene
    d = torch.randn(4, 5, dtype=torch.float64)
    assert torch.allclose(gradient_errors(f, weights, d), (d @ J).square().sum(1))


def test_it_is_the_difference_of_the_two_gradients(scene):
    """L = v_i · v_j with v_j constant, once with the embedding of now and once with an old one: the lemma's own words."""
    f, weights, _ = scene
    now, old = torch.randn(2, 5, dtype=torch.float64)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    gradients = [torch.autograd.grad(f(leaves) @ v, list(leaves.values())) for v in (now, old)]
    wanted = sum((a - b).square().sum() for a, b in zip(*gradients))
    assert torch.allclose(gradient_errors(f, weights, (now - old)[None])[0], wanted)


def test_the_bound_holds_for_every_pair(scene):
    f, weights, _ = scene
    d = torch.randn(50, 5, dtype=torch.float64)
    C = largest_singular_value_squared(f, weights, most=500, tolerance=1e-10)
    assert (gradient_errors(f, weights, d) <= C * d.square().sum(1) * (1 + 1e-6)).all()


def test_a_model_of_the_project_goes_through():
    model = build_model("small", dim=8, weights="none", channels=1).eval()
    f, weights = embedding_of(model, torch.randn(1, 16, 16))
    assert largest_singular_value_squared(f, weights, most=3) > 0
    assert gradient_errors(f, weights, torch.randn(2, 8)).shape == (2,)
