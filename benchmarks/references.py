"""One loss step on a CPU against references and a memory, relative to the same rows in one memory and to two separate calls.

    python -m benchmarks.references [--out FILE.json]

A step computes the loss and its gradient. Live references get a gradient too, which rows of a memory do not: "detached" is the
step without it.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.embeddings import commit
from benchmarks.losses import ANCHORS, DIM, M_ROWS, scene
from benchmarks.measure import machine, medians
from xbm import CrossBatchMemory
from xbm.losses import LOSSES

LIVE = (64, 4096)  # references: as many as anchors, and with many mined negatives
COLUMNS = ("one memory", "references + memory, detached", "references + memory", "two calls")


def measure(name: str, live: int) -> dict[str, float]:
    anchors, labels, bank, row_labels = scene(0.01, name)
    v, d = anchors.clone().requires_grad_(), bank[:live].clone().requires_grad_()
    ids = torch.arange(len(bank))
    whole, rest = CrossBatchMemory(len(bank), DIM), CrossBatchMemory(len(bank) - live, DIM)
    whole.enqueue(bank, row_labels, ids)
    rest.enqueue(bank[live:], row_labels[live:], ids[live:])
    loss_fn, anchor_ids = LOSSES[name](engine="streaming"), torch.arange(ANCHORS) + len(bank)

    def step(memory: CrossBatchMemory | None, references: Tensor | None) -> Tensor:
        given = {} if references is None else {"references": references}
        given |= {} if references is None else {"reference_labels": row_labels[:live], "reference_ids": ids[:live]}
        v.grad = d.grad = None
        loss = loss_fn(v, labels, memory, ids=anchor_ids, exclude="none", **given)
        loss.backward()
        return loss.detach()

    def two_calls() -> None:
        step(None, d)
        step(rest, None)

    assert torch.allclose(step(whole, None), step(rest, d), rtol=1e-3)
    calls = (lambda: step(whole, None), lambda: step(rest, d.detach()), lambda: step(rest, d), two_calls)
    return medians(dict(zip(COLUMNS, calls)), repeats=15)


def main(out: Path | None = None) -> None:
    title = f"one loss step, m {ANCHORS}, references and memory {M_ROWS:,} rows together, D {DIM}, fp32 · {machine()}"
    table = Table("loss", "references", f"{COLUMNS[0]}, ms", *(f"{column}, ×" for column in COLUMNS[1:]), title=title)
    cases = []
    for name in ("contrastive", "multi_similarity", "triplet", "sup_con"):
        for live in LIVE:
            seconds = measure(name, live)
            cases.append({"loss": name, "references": live, **{key: 1e3 * each for key, each in seconds.items()}})
            ratios = [f"{seconds[column] / seconds[COLUMNS[0]]:.2f}" for column in COLUMNS[1:]]
            table.add_row(name, f"{live:,}", f"{1e3 * seconds[COLUMNS[0]]:.1f}", *ratios)
    Console(width=120).print(table)
    if out is not None:
        about = {"command": "python -m benchmarks.references", "commit": commit(), "machine": machine()}
        about |= {"date": datetime.now(UTC).date().isoformat(), "unit": "ms", "cases": cases}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
