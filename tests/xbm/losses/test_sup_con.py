"""SupCon: log Σ_{a∈P∪N} e^{S_ia/τ} − 1/|P| Σ_k S_ik/τ, by hand."""

import math

import pytest
import torch

from tests.xbm.losses.by_hand import assert_formula, case, one_anchor
from xbm import InputError, SupConLoss


def value(P, N, t):
    if not P:
        return 0.0
    return math.log(sum(math.exp(s / t) for s in [*P, *N])) - sum(s / t for s in P) / len(P)


def weights(P, N, t):
    if not P:
        return [], [0.0] * len(N)
    everything = sum(math.exp(s / t) for s in [*P, *N])
    return [(1 / len(P) - math.exp(s / t) / everything) / t for s in P], [math.exp(s / t) / everything / t for s in N]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("temperature", [0.1, 0.43])
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_weights_by_hand(seed, temperature, reduction):
    assert_formula(
        lambda **kw: SupConLoss(temperature=temperature, reduction=reduction, **kw),
        lambda P, N: value(P, N, temperature),
        lambda P, N: weights(P, N, temperature),
        case(seed),
    )


def test_a_dominating_positive_is_pushed_away():
    """The one weight below 0 in this package, as the docstring says: more than 1/|P| of the softmax."""
    _, (dominant, weak), _ = one_anchor(SupConLoss(), [0.9, 0.1], [0.0])
    share = math.exp(9) / (math.exp(9) + math.exp(1) + 1)
    assert dominant == pytest.approx((1 / 2 - share) / 0.1) and dominant < 0 < weak


def test_positives_alone_still_compete():
    loss, on_positives, _ = one_anchor(SupConLoss(), [0.9, 0.1], [])
    assert loss == pytest.approx(value([0.9, 0.1], [], 0.1)) and on_positives[0] < 0 < on_positives[1]


def test_without_positives_nothing_is_added():
    assert one_anchor(SupConLoss(), [], [0.7, 0.4]) == (0.0, [], [0.0, 0.0])


@pytest.mark.parametrize("temperature", [0.0, -0.1])
def test_a_temperature_must_be_positive(temperature):
    loss_fn = SupConLoss()
    with pytest.raises(InputError, match="positive"):
        loss_fn.temperature = temperature
    with pytest.raises(InputError, match="positive"):
        SupConLoss(temperature)
    assert loss_fn.temperature == 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_learned_temperature_keeps_its_precision_in_a_model_of_half_precision(dtype):
    loss_fn, plain = (SupConLoss(0.07, learn_temperature=True) for _ in range(2))
    loss_fn(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    parameter, gradient = loss_fn.log_temperature, loss_fn.log_temperature.grad.clone()
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), loss_fn]).to(dtype)
    assert model[0].weight.dtype == dtype and loss_fn.log_temperature is parameter
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert torch.equal(parameter, plain.log_temperature) and torch.equal(parameter.grad, gradient)
    with torch.no_grad():
        parameter -= 1e-5  # in half precision this is rounded away
    assert parameter < plain.log_temperature
    plain.load_state_dict(loss_fn.state_dict())
    assert torch.equal(plain.log_temperature, parameter)
    plain.load_state_dict({"log_temperature": parameter.detach().to(dtype)})  # as it was saved before
    assert plain.log_temperature.dtype == torch.float32
    v = torch.nn.functional.normalize(torch.randn(4, 8)).to(dtype).requires_grad_()
    for engine in ("reference", "streaming"):
        loss_fn.engine = engine
        loss_fn(v, torch.tensor([0, 0, 1, 1])).backward()
    assert v.grad.dtype == dtype and loss_fn.double().log_temperature.dtype == torch.float64


def test_a_model_on_another_device_takes_the_temperature_along():
    loss_fn = SupConLoss(0.07, learn_temperature=True).to("meta", torch.bfloat16)
    assert loss_fn.log_temperature.device.type == "meta" and loss_fn.log_temperature.dtype == torch.float32
