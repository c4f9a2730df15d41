"""The kernels of local response normalization against torch."""

import pytest
import torch
from torch.nn import functional as F

from tests.xbm_app.models.fused.maps import CASES, channel_slice, channels_last, close
from xbm_app.models.fused import fuse
from xbm_app.models.fused.window_layers import response_norm
from xbm_app.models.inception import GoogLeNet

pytestmark = pytest.mark.usefixtures("small_tiles")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_output_and_gradient_are_torchs(shape, dtype, slices):
    x = channels_last(*shape, dtype=dtype, scale=3.0).requires_grad_()
    dy = (channel_slice if slices else channels_last)(*shape, dtype=dtype)
    y = response_norm(x, 0.1 / 5, 0.75)  # an α at which the scale matters
    wide = x.detach().double().requires_grad_()
    wanted = F.local_response_norm(wide, 5, 0.1, 0.75, 1.0)
    close(y.detach(), wanted.detach(), TOLERANCE[dtype])
    (dx,), (wanted_dx,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(wanted, wide, dy.double())
    close(dx, wanted_dx, TOLERANCE[dtype])
    assert y.dtype == dx.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


def test_large_activations_keep_their_digits():
    """GoogLeNet's are in the hundreds: its input is 0 to 255."""
    x = channels_last(2, 64, 3, 3, scale=2000.0)
    close(response_norm(x, 1e-4 / 5, 0.75), F.local_response_norm(x.double(), 5, 1e-4, 0.75, 1.0), 1e-5)


def test_a_gradient_of_the_gradient_is_torchs():
    x = channels_last(2, 7, 3, 2, scale=3.0).requires_grad_()
    seconds = []
    for norm in (lambda x: response_norm(x, 0.02, 0.75), lambda x: F.local_response_norm(x, 5, 0.1, 0.75, 1.0)):
        (first,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    close(*seconds, 1e-4)


def test_a_fused_googlenet_computes_what_the_plain_one_does():
    torch.manual_seed(0)
    net, images = GoogLeNet().to(memory_format=torch.channels_last), 50 * channels_last(1, 3, 40, 40)
    x = images.requires_grad_()
    plain = net(x)
    (wanted,) = torch.autograd.grad(plain.sum(), x)
    fused = fuse(net)(x)
    close(fused.detach(), plain.detach(), 1e-4, floor=1e-6)
    close(torch.autograd.grad(fused.sum(), x)[0], wanted, 1e-4, floor=1e-9)
