"""The forward kernels against torch: statistics, output, running statistics."""

import pytest
import torch

from tests.xbm_app.models.fused.maps import ACTIVATIONS, CASES, TOLERANCE, channels_last, close, parameters, torch_norm
from xbm_app.models.fused.batch_norm import KNOWN
from xbm_app.models.fused.layout import pixel_stride
from xbm_app.models.fused.norm_forward import forward

pytestmark = pytest.mark.usefixtures("small_tiles")


def by_kernels(x, weight, bias, activation="none", momentum=0.3, eps=1e-3):
    C = x.shape[1]
    running = torch.full((C,), 0.5), torch.full((C,), 2.0), torch.tensor(4)
    tickets = torch.zeros(C // 16 + 1, dtype=torch.int32)
    y, stats = forward(x, pixel_stride(x), weight, bias, *running, tickets, momentum, eps, KNOWN.index(activation))
    assert not tickets.any()
    return y, stats, running


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_output_and_statistics_are_torchs(shape, dtype):
    x = channels_last(*shape, dtype=dtype, scale=3.0, shift=2.0)
    weight, bias = parameters(shape[1])
    for activation in ACTIVATIONS:
        y, stats, (mean, var, batches) = by_kernels(x, weight, bias, activation)
        wide = x.double()
        close(y, torch_norm(wide, weight.double(), bias.double(), 1e-3, activation), TOLERANCE[dtype])
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        norm = torch.nn.BatchNorm2d(shape[1], momentum=0.3, dtype=torch.float64)
        norm.running_mean.fill_(0.5), norm.running_var.fill_(2.0)
        norm(wide)
        close(mean, norm.running_mean, 1e-6)
        close(var, norm.running_var, 1e-5)
        close(stats[1], (wide.var((0, 2, 3), unbiased=False) + 1e-3).rsqrt(), 1e-5)
        assert int(batches) == 5


def test_variances_survive_a_mean_ten_thousand_times_as_large():
    x = channels_last(3, 17, 7, 5, shift=1e4)
    _, stats, _ = by_kernels(x, *parameters(17), eps=0.0)
    close(stats[1], x.double().var((0, 2, 3), unbiased=False).rsqrt(), 1e-4)


def test_variances_survive_an_image_that_is_unlike_the_others():
    x = channels_last(3, 17, 7, 5)
    x[0] = 3e3
    _, stats, _ = by_kernels(x, *parameters(17), eps=0.0)
    close(stats[1], x.double().var((0, 2, 3), unbiased=False).rsqrt(), 1e-5)


def test_a_slice_of_channels_is_read_where_it_lies():
    whole = channels_last(3, 40, 7, 5)
    weight, bias = parameters(16)
    for start in (8, 3):  # aligned, and not
        part = whole[:, start : start + 16]
        y, _, _ = by_kernels(part, weight, bias, "relu")
        close(y, torch_norm(part, weight, bias, 1e-3, "relu"), 1e-5)


def test_nan_goes_through_as_in_torch():
    x = channels_last(3, 17, 7, 5)
    x[1, 3, 2, 2] = torch.nan
    y, _, (mean, var, _) = by_kernels(x, *parameters(17), "relu6")
    assert y.isnan().any((0, 2, 3)).nonzero().tolist() == [[3]] and y[:, 3].isnan().all()
    assert mean.isnan().nonzero().tolist() == var.isnan().nonzero().tolist() == [[3]]


def test_the_same_bits_twice():
    x, (weight, bias) = channels_last(3, 67, 7, 5), parameters(67)
    assert all(torch.equal(a, b) for a, b in zip(*(by_kernels(x, weight, bias)[:2] for _ in range(2))))
