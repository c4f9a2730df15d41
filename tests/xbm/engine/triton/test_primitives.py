"""The arithmetic that kernels share."""

import torch
import triton
import triton.language as tl

from xbm.engine.triton.primitives import block_similarities, log1p_exp_sum


@triton.jit
def _logs(mass, peak, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, log1p_exp_sum(tl.load(mass + n), tl.load(peak + n)))


def test_the_logarithm_of_one_plus_a_sum_is_exact_for_tiny_and_for_huge_sums():
    mass = torch.tensor([0.0, 1e-30, 1e-9, 3e-8, 1e-4, 0.7, 5e4, 2.0])
    peak = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 300.0])
    out = torch.zeros(8)
    _logs[(1,)](mass, peak, out, 8)
    expected = torch.log1p(mass.double())
    expected[7] = 300 + torch.log(torch.tensor(2.0))
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=0)


@triton.jit
def _similarities(anchors, rows, out, D: tl.constexpr, BK: tl.constexpr):
    n = tl.arange(0, 16)
    S = block_similarities(anchors, rows, n, n, n < 16, n < 16, D, 16, 16, BK, "ieee")
    tl.store(out + n[:, None] * 16 + n[None, :], S)


def test_long_float32_sums_lose_no_more_than_the_last_bit():
    torch.manual_seed(0)
    anchors = torch.nn.functional.normalize(torch.randn(16, 4093) + 1)
    rows = torch.nn.functional.normalize(anchors + 0.01 * torch.randn(16, 4093))
    out = torch.zeros(16, 16)
    _similarities[(1,)](anchors, rows, out, 4093, 16)
    error = (out.double() - anchors.double() @ rows.double().T).abs().max()
    assert error < 1.2e-7  # without carrying what is lost: 1e-6
