"""The arithmetic that kernels share."""

import torch
import triton
import triton.language as tl

from xbm.engine.triton.tiles import log_of_one_plus


@triton.jit
def _logs(mass, peak, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, log_of_one_plus(tl.load(mass + n), tl.load(peak + n)))


def test_the_logarithm_of_one_plus_a_sum_is_exact_for_tiny_and_for_huge_sums():
    mass = torch.tensor([0.0, 1e-30, 1e-9, 3e-8, 1e-4, 0.7, 5e4, 2.0])
    peak = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 300.0])
    out = torch.zeros(8)
    _logs[(1,)](mass, peak, out, 8)
    expected = torch.log1p(mass.double())
    expected[7] = 300 + torch.log(torch.tensor(2.0))
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=0)
