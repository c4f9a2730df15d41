"""The kernels without a GPU: run by Triton's interpreter in a process of its own, and compiled for an H200."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from xbm import (
    CircleLoss,
    ContrastiveLoss,
    LiftedStructureLoss,
    MarginLoss,
    MultiSimilarityLoss,
    NPairsLoss,
    SupConLoss,
    TripletLoss,
)
from xbm.engine.pairing import Pairing
from xbm.kernels import INTERPRETED

pytest.importorskip("triton", minversion="3.6", reason="the kernels need Triton 3.6 or later")

from tests.xbm.engine.triton.sm90 import SHARED, _torn, compile_step
from xbm.engine import triton as kernels

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this is the process that starts the interpreter's")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_give_what_autograd_gives_under_the_interpreter(which):
    """Switched on before anything imports triton (torchvision does)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-m", which, "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def launch(loss, m=64, M=59_551, D=512, stored=torch.bfloat16, self_by="id", stats=False, in_batch=False, row_gradient=False):
    """What a step on a GPU would start, on empty tensors of the right shapes and types."""

    def whole(n):
        return torch.empty(n, dtype=torch.int64)

    given = torch.empty(m, D, dtype=stored if in_batch else torch.float32)
    rows, M = (given, m) if in_batch else (torch.empty(M, D, dtype=stored), M)
    scalar = torch.empty((), dtype=torch.int64)
    pairing = Pairing(
        rows, whole(M), whole(M), whole(m), None,
        ids=None if self_by == "place" else whole(m), row_ids=whole(M) if self_by == "id" else None,
        own=whole(m) if self_by == "slot" else None, latest=(scalar, scalar) if self_by == "place" and not in_batch else None,
        in_batch=in_batch,
    )  # fmt: skip
    return compile_step(lambda: kernels.compare(loss, given, pairing, True, row_gradient, stats))


def check(found):
    for kernel in found:
        print(kernel)
        assert kernel.shared <= SHARED, f"{kernel}: an H200 has 227 KB"
        assert not kernel.torn, kernel
        assert not kernel.races, f"{kernel}: may read before what it reads was written"
        assert kernel.registers > 32 or kernel.spilled <= 64, f"{kernel}: given up by the assembler"
        assert kernel.spilled <= 2200, kernel


LOOP = """
  %b_1 = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x512xbf16, #shared, #smem, mutable>
  %S = scf.for %k = %c0 to %n step %c1 {{
    %b_2 = ttg.memdesc_index %b_1[%j]
    %now = ttg.warp_group_dot %a, {early}, %acc
    %t = ttg.async_copy_global_to_local %p, %b_2
    %b_3 = {third}
    %x = ttg.warp_group_dot %w, %b_3, %acc
"""


def test_a_tile_that_is_overwritten_before_its_last_use_is_seen():
    third = "ttg.memdesc_index %b_1[%i]"
    assert _torn(LOOP.format(buffers=2, early="%v", third=third), stages=3)
    assert not _torn(LOOP.format(buffers=3, early="%v", third=third), stages=3)
    other = "ttg.local_load %elsewhere"  # the name of a view, given again to something else
    assert not _torn(LOOP.format(buffers=2, early="%b_2", third=other).replace("%b_3", "%b_2"), stages=3)


def test_the_papers_step_compiles_for_an_h200():
    found = launch(ContrastiveLoss())
    check(found)
    bank_pass, finish = found
    assert (bank_pass.name, finish.name) == ("pass_kernel", "finish_kernel")
    assert bank_pass.tensor_cores > 0 and bank_pass.fetches_ahead and bank_pass.spilled <= 512 and finish.spilled == 0


def test_a_step_of_sup_con_compiles_for_an_h200():
    found = launch(SupConLoss(learn_temperature=True), stats=True)
    check(found)
    assert [kernel.name for kernel in found][-2:] == ["pass_kernel", "finish_kernel"]
    assert found[-2].tensor_cores > 0 and found[-2].fetches_ahead and found[-1].spilled == 0


@pytest.mark.parametrize("reduction", ["sum", "mean", "balanced"])
def test_a_small_nets_step_takes_two_kernels_whatever_the_reduction(reduction):
    found = launch(ContrastiveLoss(reduction=reduction), M=19_280, D=64, stats=True, self_by="slot")
    check(found)
    assert [kernel.name for kernel in found] == ["pass_kernel", "finish_kernel"] and all(
        kernel.spilled <= 128 for kernel in found
    )


def test_what_a_memory_does_compiles_for_an_h200():
    def whole(*shape):
        return torch.empty(shape, dtype=torch.int64)

    bank = torch.empty(59_551, 512, dtype=torch.bfloat16)
    buffers = (bank, *(whole(59_551) for _ in range(3)), *(whole() for _ in range(5)))
    check(compile_step(lambda: kernels.enqueue(torch.empty(64, 512), whole(64), whole(64), None, *buffers)))
    keyed = (*buffers[:4], *(whole() for _ in range(3)), 0.9)
    check(compile_step(lambda: kernels.assign(torch.empty(64, 512), whole(64), whole(64), None, *keyed)))
    check(compile_step(lambda: kernels.descend(bank, bank, 0.1)))
    check(compile_step(lambda: kernels.newest_copies(whole(64), whole(59_551), whole(59_551), whole())))


EVERY = {
    "contrastive": ContrastiveLoss(), "averaged": ContrastiveLoss(reduction="mean"),
    "balanced": ContrastiveLoss(reduction="balanced"),
    "multi_similarity": MultiSimilarityLoss(), "triplet": TripletLoss(), "margin": MarginLoss(reduction="balanced"),
    "sup_con": SupConLoss(), "learned": SupConLoss(learn_temperature=True), "lifted_structure": LiftedStructureLoss(),
    "n_pairs": NPairsLoss(), "circle": CircleLoss(),
}  # fmt: skip


OLDEST = list(EVERY)[:5]  # the others share their kernels, so a few of their configurations are enough
CONFIGURATIONS = [
    *product(OLDEST, [16, 60, 64, 100, 128, 129, 256, 512, 640, 2048], [torch.bfloat16, torch.float16, torch.float32]),
    *product(list(EVERY)[5:], [60, 512, 2048], [torch.bfloat16]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "D", "stored"), CONFIGURATIONS)
def test_every_configuration_compiles_for_an_h200(name, D, stored):
    check(launch(EVERY[name], D=D, stored=stored))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OLDEST, "sup_con", "circle"])
@pytest.mark.parametrize("case", ["statistics", "slot", "place", "batch", "rows", "tiny", "wide batch"])
def test_every_way_of_pairing_compiles_for_an_h200(name, case):
    ways = {
        "statistics": {"stats": True}, "slot": {"self_by": "slot"}, "place": {"self_by": "place"},
        "batch": {"in_batch": True, "stored": torch.float32, "self_by": "place"}, "rows": {"row_gradient": True, "M": 5000},
        "tiny": {"M": 7, "m": 3, "stats": True}, "wide batch": {"in_batch": True, "m": 300, "D": 768},
    }  # fmt: skip
    check(launch(EVERY[name], **ways[case]))
