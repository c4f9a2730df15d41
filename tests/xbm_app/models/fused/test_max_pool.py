"""The pooling kernels against torch."""

import pytest
import torch
from torch.nn import functional as F

from tests.xbm_app.models.fused.maps import channel_slice, channels_last
from xbm_app.models.fused.window_layers import max_pool, pooled_size

pytestmark = pytest.mark.usefixtures("small_tiles")
WINDOWS = [(k, s, p, ceil) for k in (2, 3) for s in (1, 2) for p in (0, 1) for ceil in (False, True)]


def both(x, window, slices=False):
    """(output, gradient) from the kernels and from torch."""
    kernel, stride, padding, ceil = window
    found = []
    for pool in (max_pool, lambda x, k, s, p, c: F.max_pool2d(x, k, s, p, ceil_mode=c)):
        x = x.detach().requires_grad_()
        y = pool(x, kernel, stride, padding, ceil)
        if not found:
            dy = (channel_slice if slices else channels_last)(*y.shape).round(decimals=1).to(x.dtype)
            dy = dy if not slices else F.pad(dy, (0, 0, 0, 0, 8, 16)).to(memory_format=torch.channels_last)[:, 8:-16]
        found.append((y.detach(), *torch.autograd.grad(y, x, dy)))
    return found


def check(x, window, slices):
    (y, dx), (wanted, wanted_dx) = both(x, window, slices)
    assert torch.equal(y, wanted) and y.dtype == x.dtype and y.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(dx, wanted_dx, atol=1e-6 if x.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_window_gives_torchs_output_and_gradient(window):
    check(channels_last(3, 5, 7, 5), window, slices=window[0] == 3)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize(("C", "dtype"), [(5, torch.float32), (24, torch.float16), (64, torch.float16), (67, torch.float32)])
def test_every_width_and_type_gives_torchs_output_and_gradient(C, dtype, slices):
    check(channels_last(3, C, 7, 5, dtype=dtype), (3, 2, 1, True), slices)


@pytest.mark.parametrize("window", [(3, 1, 1, False), (3, 2, 1, True), (2, 1, 0, False)])
def test_the_first_of_equal_maxima_gets_the_gradient(window):
    x = torch.randint(0, 3, (3, 8, 7, 5)).float().to(memory_format=torch.channels_last)
    x[0] = -torch.inf
    (y, dx), (wanted, wanted_dx) = both(x, window)
    assert torch.equal(y, wanted) and torch.allclose(dx, wanted_dx, atol=1e-6)


@pytest.mark.parametrize("window", [(3, 1, 1, False), (3, 2, 0, True), (2, 2, 0, False)])
def test_nan_is_a_maximum_as_in_torch(window):
    x = channels_last(3, 8, 7, 5)
    x[torch.rand(x.shape) < 0.2] = torch.nan
    (y, dx), (wanted, wanted_dx) = both(x, window)
    assert torch.equal(y.isnan(), wanted.isnan()) and torch.equal(y.nan_to_num(), wanted.nan_to_num())
    assert torch.allclose(dx, wanted_dx, atol=1e-6)


def test_sizes_are_torchs():
    for size in range(3, 12):
        for kernel, stride, padding, ceil in WINDOWS:
            wanted = F.max_pool2d(torch.zeros(1, 1, size, size), kernel, stride, padding, ceil_mode=ceil).shape[-1]
            assert pooled_size(size, kernel, stride, padding, ceil) == wanted, (size, kernel, stride, padding, ceil)


def test_a_gradient_of_the_gradient_is_torchs():
    x = channels_last(2, 5, 7, 5).requires_grad_()
    found = []
    for pool in (lambda x: max_pool(x, 3, 2, 1, True), lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)):
        (first,) = torch.autograd.grad((pool(x) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), x)[0])
    assert torch.allclose(*found, atol=1e-4)
