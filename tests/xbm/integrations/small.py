"""What the runs of these tests share: a tiny problem, and the comparison of an interrupted run with one that was not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.same import same
from xbm import ContrastiveLoss, CrossBatchMemory

ITEMS, CLASSES, BATCH, DIM, SIZE = 48, 6, 8, 5, 31  # six batches an epoch; a lap of the memory ends in the middle of one


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (48, 10), labels and ids."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(ITEMS) % CLASSES
    inputs = torch.randn(CLASSES, 10, generator=draw)[labels] + 0.7 * torch.randn(ITEMS, 10, generator=draw)
    return inputs, labels, torch.arange(ITEMS)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(10, DIM)


def memory() -> CrossBatchMemory:
    return CrossBatchMemory(SIZE, DIM)


def step(model: nn.Module, bank: Any, inputs: Tensor, labels: Tensor, ids: Tensor, loss_fn: Any = None) -> Tensor:
    """The loss of a batch, which depends on everything that the memory holds."""
    v = F.normalize(model(inputs))
    bank.enqueue(v.detach(), labels, ids)
    return (loss_fn or ContrastiveLoss(margin=-0.5))(v, labels, bank, ids=ids)


def run_module(name: str, *words: object, processes: int = 1) -> None:
    """Runs a module of these tests in a new process, or in several that train together."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[3]
    command = [*launcher, f"tests.xbm.integrations.{name}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr


def assert_same_end(folder: Path, whole: str = "whole.pt", rest: str = "rest.pt") -> None:
    """Two runs ended with the same memory and the same weights, bit for bit, and the memory was used."""
    one, other = (torch.load(folder / name, weights_only=True) for name in (whole, rest))
    assert same(one, other) == []
    assert int(one["memory"]["clock"]) > 0 and not torch.equal(one["model"]["weight"], net().weight)
