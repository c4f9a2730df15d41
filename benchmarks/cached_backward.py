"""Peak memory and time of one step on 512 to 8,192 inputs on a CPU: the plain step, and `cached_backward` in chunks of 32.

    python -m benchmarks.cached_backward [--out FILE.json]

Memory is what torch allocates beyond the model, its gradients, the inputs and the cross-batch memory. A step in chunks needs
the (N, D) embeddings, their gradient, and the larger of two: the work of the loss, or that of a chunk. docs/pairs.md has the
figures.
"""

import argparse
import json
import platform
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.embeddings import commit
from benchmarks.measure import machine, medians, peak_bytes
from xbm import ContrastiveLoss, CrossBatchMemory, cached_backward

SIZES, CHUNK, WIDTHS, ROWS = (512, 2048, 8192), 32, (256, 512, 512, 512, 128), 1024
DIM = WIDTHS[-1]


def network() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1)) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(*layers, nn.Linear(DIM, DIM), UnitRows())


class UnitRows(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        return F.normalize(v)


def measure(inputs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, memory, loss_fn = network(), CrossBatchMemory(ROWS, DIM), ContrastiveLoss()
    memory.enqueue(F.normalize(torch.randn(ROWS, DIM)), torch.arange(ROWS) // 4, torch.arange(ROWS))
    x, labels, ids = torch.randn(inputs, WIDTHS[0]), torch.arange(inputs) // 4, torch.arange(inputs) + ROWS

    def loss_of(v: Tensor) -> Tensor:
        return loss_fn(v, labels, memory, ids=ids)

    def plain() -> None:
        loss_of(model(x)).backward()

    def cached() -> None:
        cached_backward(model, x, loss_of, chunk=CHUNK)

    def loss_alone() -> None:
        loss_of(torch.empty_like(v).copy_(v).requires_grad_()).backward()

    def chunks_alone() -> None:
        kept = []  # otherwise the embeddings would be gone, and leave room, while the chunks are embedded again
        cached_backward(model, x, lambda v: kept.append(v) or v.sum(), chunk=CHUNK)

    v = model(x).detach()
    seconds = medians({"plain": plain, "cached": cached}, repeats=3, warm_up=1)
    both = 2 * v.nbytes
    return {
        "inputs": inputs, "plain_bytes": peak_bytes(plain), "cached_bytes": peak_bytes(cached),
        "loss_bytes": peak_bytes(loss_alone), "embeddings_and_gradient_bytes": both,
        "chunk_bytes": peak_bytes(chunks_alone) - both,
        "plain_seconds": seconds["plain"], "cached_seconds": seconds["cached"],
    }  # fmt: skip


def main(out: Path | None = None) -> None:
    title = f"one step, {'-'.join(map(str, WIDTHS))}, contrastive loss against {ROWS:,} rows, chunks of {CHUNK} · {machine()}"
    columns = ("inputs", "plain MB", "cached MB", "loss alone MB", "2 · N · D MB", "chunk MB", "cached / plain time")
    table, cases = Table(*columns, title=title), []
    for inputs in SIZES:
        case = measure(inputs)
        cases.append(case)
        names = ("plain", "cached", "loss", "embeddings_and_gradient", "chunk")
        table.add_row(
            f"{inputs:,}", *(f"{case[f'{name}_bytes'] / 1e6:.2f}" for name in names),
            f"{case['cached_seconds'] / case['plain_seconds']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if out is not None:
        about = {"device": machine(), "torch": torch.__version__, "python": platform.python_version()}
        about |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": "python -m benchmarks.cached_backward"}
        about |= {"commit": commit(), "chunk": CHUNK, "widths": WIDTHS, "rows": ROWS, "cases": cases}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
