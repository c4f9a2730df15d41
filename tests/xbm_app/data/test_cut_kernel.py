"""The kernel that cuts windows, run by Triton's interpreter in a process of its own, against plain tensor operations."""

import os
import subprocess
import sys

import pytest
import torch

from xbm.kernels import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="the kernels need Triton 3.6 or later")
CHECK = """
import torch
from xbm_app.data.cut_kernel import cut_windows
from xbm_app.data.transforms import Windows, cut_resident
torch.manual_seed(0)
for C in (3, 1):
    heights, widths = torch.tensor([40, 31, 57]), torch.tensor([33, 64, 29])
    ends = (heights * widths).cumsum(0)
    starts, table = ends - heights * widths, torch.randint(0, 256, (int(ends[-1]), C), dtype=torch.uint8)
    size = 29
    top, left, flip = torch.tensor([-3, 2, 28]), torch.tensor([4, 38, 1]), torch.tensor([0, 1, 1])
    side = torch.full((3,), size)
    norm = torch.rand(C) * 255, torch.rand(C)
    windows = Windows(top, left, side, side, flip)
    expected = cut_resident(table, starts, heights, widths, windows, size, norm)
    found = cut_windows(table, torch.stack([starts, heights, widths, *windows]), size, norm)
    assert torch.equal(found, expected), C
    assert found.stride() == expected.stride()
print("the same")
"""


@pytest.mark.slow
def test_windows_are_those_of_the_plain_operations_bit_for_bit():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "the same", done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_and_on_a_gpu():
    check = CHECK.replace("import torch\n", "import torch\ntorch.set_default_device('cuda')\n", 1)
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "the same", done.stderr[-3000:]
