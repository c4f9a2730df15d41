"""Fusing a model: nothing changes but the kernels. Those run in a process of their own (Triton's interpreter), and are compiled
for an H200 here.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xbm.kernels import INTERPRETED
from xbm_app.models import build_model, freeze_batch_norm
from xbm_app.models.fused import fuse

pytest.importorskip("triton", minversion="3.6", reason="the kernels need Triton 3.6 or later")

from tests.xbm.engine.triton.sm90 import SHARED, compile_step
from xbm_app.models.fused.batch_norm import backward, forward
from xbm_app.models.fused.window_layers import max_pool, response_norm

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this is the process that starts the interpreter's")
QUICK = {"efficientnet_lite0", "googlenet_bvlc", "small"}
TRUNKS = {"googlenet": 64, "googlenet_bvlc": 64, "resnet50": 64, "efficientnet_lite0": 64, "bn_inception": 64, "small": 32}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_the_kernels_give_what_torch_gives_under_the_interpreter(which):
    """Switched on before anything imports triton (torchvision does)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-m", which, "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def outcome(model, images):
    """Everything a training step and an evaluation give."""
    model.train()
    y = model(images)
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, y.shape[1])).sum(), list(model.parameters()))
    buffers = [b.clone() for b in model.state_dict().values()]
    return [y, *gradients, *buffers, model.eval()(images)]


@pytest.mark.parametrize("block", ["BasicBlock", "Bottleneck"])
def test_a_residual_block_with_an_activation_of_its_own_or_a_hook_on_it_is_left_alone(block):
    from torchvision.models import resnet

    images = torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last)
    plain = getattr(resnet, block)(64, 64 if block == "BasicBlock" else 16)
    calls = []
    fused = fuse(copy.deepcopy(plain))
    fused.relu.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(fused(images), plain(images)) and len(calls) == (2 if block == "BasicBlock" else 3)
    plain.relu = torch.nn.SiLU()
    assert torch.equal(fuse(copy.deepcopy(plain))(images), plain(images))


@pytest.mark.parametrize(
    "trunk", [trunk if trunk in QUICK else pytest.param(trunk, marks=pytest.mark.slow) for trunk in TRUNKS]
)
def test_a_fused_model_does_the_same_on_a_cpu(trunk):
    channels = 1 if trunk == "small" else 3
    plain = build_model(trunk, dim=16, weights="none", channels=channels)
    fused = fuse(copy.deepcopy(plain))
    images = torch.randn(2, channels, TRUNKS[trunk], TRUNKS[trunk]).to(memory_format=torch.channels_last)
    for a, b in zip(outcome(plain, images), outcome(fused, images), strict=True):
        assert torch.equal(a, b)
    plain.load_state_dict(fused.state_dict())
    fused.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in fused.named_parameters()]
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in fused.named_modules()]


@pytest.mark.parametrize(
    ("trunk", "norms", "pools"), [("googlenet", 57, 13), ("resnet50", 53, 1), ("efficientnet_lite0", 49, 0)]
)
def test_every_norm_and_pool_of_a_trunk_is_fused(trunk, norms, pools):
    modules = list(fuse(build_model(trunk, weights="none")).modules())
    assert sum(hasattr(m, "tickets") for m in modules) == norms
    assert sum(isinstance(m, torch.nn.MaxPool2d) and "forward" in vars(m) for m in modules) == pools


def test_a_copy_of_a_fused_model_is_a_model_of_its_own():
    model = fuse(build_model("small", weights="none"))
    twin = copy.deepcopy(fuse(model))  # fusing twice does no harm
    for parameter in twin.parameters():
        parameter.data.zero_()
    norms = [m for m in twin.modules() if "forward" in vars(m)]
    assert norms and all(m.forward.__self__ is m for m in norms)
    images = torch.randn(3, 3, 32, 32)
    assert not twin.trunk(images).any() and model.trunk(images).any()


def test_frozen_batch_norm_stays_frozen():
    model = fuse(build_model("small", weights="none"))
    freeze_batch_norm(model)
    before = copy.deepcopy(model.state_dict())
    model.train()(torch.randn(3, 3, 32, 32))
    assert all(torch.equal(b, before[name]) for name, b in model.state_dict().items())


# ------------------------------------------------------------------ compiled for an H200, without one


def last(*shape, dtype):
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def norm_step(C, act, dtype, added=False):
    def call():
        x, dy = last(64, C, 28, 28, dtype=dtype), last(64, C + 32, 28, 28, dtype=dtype)[:, :C]
        tickets, (w, b, mean, var) = torch.zeros(C, dtype=torch.int32), (torch.empty(C) for _ in range(4))
        y, stats = forward(x, C, w, b, mean, var, torch.tensor(0), tickets, 0.1, 1e-3, act, x if added else None)
        backward(dy, x, C, w, b, stats, tickets, act, True, y if added else None)

    return call


def pool_step(C, kernel, stride, padding, dtype):
    def call():
        y = max_pool(last(64, C, 28, 28, dtype=dtype).requires_grad_(), kernel, stride, padding, True)
        y.backward(torch.empty_like(y))

    return call


def response_step(C, dtype):
    def call():
        y = response_norm(last(64, C, 56, 56, dtype=dtype).requires_grad_(), 2e-5, 0.75)
        y.backward(torch.empty_like(y))

    return call


def check(call, spilled):
    found = compile_step(call)
    for kernel in found:
        print(kernel)
        assert kernel.shared <= SHARED and kernel.spilled <= spilled and not kernel.races, kernel
    return found


def test_the_papers_step_compiles_for_an_h200():
    for added in (False, True):
        norms = check(norm_step(64, 1, torch.bfloat16, added), spilled=0)
        assert [k.name for k in norms] == [
            "statistics_kernel", "normalize_kernel", "parameter_gradient_kernel", "input_gradient_kernel",
        ]  # fmt: skip
        assert max(norms[0].registers, norms[2].registers) <= 128, "or two programs no longer fit a multiprocessor"
    pools = check(pool_step(64, 3, 1, 1, torch.bfloat16), spilled=0)
    assert [k.name for k in pools] == ["max_pool_kernel", "max_pool_gradient_kernel"]
    for C, dtype in ((64, torch.bfloat16), (192, torch.bfloat16), (192, torch.float32)):
        norms = check(response_step(C, dtype), spilled=0)
        assert [k.name for k in norms] == ["response_norm_kernel", "response_norm_gradient_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("C", [16, 24, 64, 67])
def test_every_configuration_compiles_for_an_h200(C, dtype):
    """Channels that are not a multiple of 8 are read one by one, which takes an address each."""
    most = 512 if C % 8 else 16
    for act in range(3):
        check(norm_step(C, act, dtype), most)
        check(norm_step(C, act, dtype, added=True), most)
    for window in [(k, s, p) for k in (2, 3) for s in (1, 2) for p in (0, 1)]:
        check(pool_step(C, *window, dtype), most)


# ------------------------------------------------------------------ on a GPU


def gradients(model, images, low):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        y = model(images)
    (y * torch.linspace(-1, 1, y.shape[1], device="cuda")).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("trunk", ["googlenet", "googlenet_bvlc", "resnet50", "efficientnet_lite0"])
def test_gradients_on_a_gpu_are_the_plain_models(trunk, monkeypatch):
    """Depth amplifies rounding: the fused model may be no farther from float64 than the plain one, within a factor."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain = build_model(trunk, dim=64, weights="none").cuda().to(memory_format=torch.channels_last)
    fused = fuse(copy.deepcopy(plain))
    images = torch.randn(16, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)
    exact = gradients(copy.deepcopy(plain).double(), images.double(), low=False)
    for low, factor in ((False, 3), (True, 1.5)):
        errors = [(gradients(model, images, low) - exact).norm() / exact.norm() for model in (plain, fused)]
        assert errors[1] <= factor * errors[0], (low, errors)
    for name, b in plain.state_dict().items():
        assert torch.allclose(fused.state_dict()[name].float(), b.float(), rtol=2e-2, atol=1e-2), name
