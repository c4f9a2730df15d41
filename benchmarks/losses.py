"""One loss step (forward and backward) against a memory of 59,551 × 512 on a CPU: ours, dense autograd and
pytorch-metric-learning, relative to the bare product `anchors @ bank.T`, which each of them has to compute.

    python -m benchmarks.losses
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import machine, medians, peak_bytes
from xbm import ContrastiveLoss, CrossBatchMemory, MultiSimilarityLoss, TripletLoss

M_ROWS, ANCHORS, DIM, PER_CLASS = 59_551, 64, 512, 5  # Stanford Online Products' training set, the paper's batch


def scene(share: float, loss: str, rows: int = M_ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns anchors, labels, bank rows and their labels, such that about `share` of all pairs is valid for `loss`.

    Rows form clusters. An anchor is close to the rows of its own cluster, which is `share` of the bank. Positives (5 per
    class) are slightly closer than the other rows of the cluster, so that mining keeps the cluster and drops the rest.
    """
    torch.manual_seed(0)
    row_labels = torch.arange(rows) // PER_CLASS
    labels = (torch.arange(ANCHORS) // 4) * (row_labels.max().item() // 20)
    if share == 0:
        bank = F.normalize(torch.randn(rows, DIM), dim=1)
        anchors = F.normalize(torch.randn(ANCHORS, DIM), dim=1)
        return anchors, labels + 10**6, bank, row_labels  # classes that are not in the bank, so no positives either
    clusters = max(1, round(1 / share))
    centre = F.normalize(torch.randn(clusters, DIM), dim=1)
    which = torch.arange(row_labels.max().item() + 1) % clusters  # of each class
    bank = F.normalize(centre[which[row_labels]] + 0.02 * torch.randn(rows, DIM), dim=1)
    anchors = F.normalize(centre[which[labels]] + 0.02 * torch.randn(ANCHORS, DIM), dim=1)
    return anchors, labels, bank, row_labels


OURS: dict[str, Callable] = {"contrastive": ContrastiveLoss, "multi_similarity": MultiSimilarityLoss, "triplet": TripletLoss}


def peers(loss: str, v: Tensor, labels: Tensor, bank: Tensor, row_labels: Tensor) -> dict[str, Callable[[], object]]:
    """The same step with pytorch-metric-learning: its losses against a reference bank, and with its own memory."""
    from pytorch_metric_learning import distances, losses, miners

    cosine = distances.CosineSimilarity()
    if loss == "contrastive":
        theirs: Any = losses.ContrastiveLoss(pos_margin=1, neg_margin=0.5, distance=cosine)
    elif loss == "triplet":
        theirs = losses.TripletMarginLoss(margin=0.1, distance=cosine, triplets_per_anchor="all")
    else:
        theirs = losses.MultiSimilarityLoss(alpha=2, beta=40, base=0.5)
    miner = miners.MultiSimilarityMiner(epsilon=0.1) if loss == "multi_similarity" else None

    def against_bank() -> None:
        v.grad = None
        pairs = miner(v, labels, bank, row_labels) if miner else None
        theirs(v, labels, pairs, ref_emb=bank, ref_labels=row_labels).backward()

    cases = {"pml loss" + (" + miner" if miner else ""): against_bank}
    if loss == "contrastive":
        memory = losses.CrossBatchMemory(theirs, DIM, memory_size=len(bank))
        memory.embedding_memory.copy_(bank)
        memory.label_memory.copy_(row_labels)
        memory.has_been_filled = True

        def with_memory() -> None:
            v.grad = None
            memory(v, labels).backward()

        cases["pml CrossBatchMemory"] = with_memory
    return cases


def measure(loss: str, share: float) -> list[dict[str, Any]]:
    anchors, labels, bank, row_labels = scene(share, loss)
    memory = CrossBatchMemory(len(bank), DIM)
    memory.enqueue(bank, row_labels, torch.arange(len(bank)))
    ids = torch.arange(len(anchors)) + len(bank)  # none is in the bank, so all pairs count
    v = anchors.clone().requires_grad_()
    ours, dense = OURS[loss](engine="streaming"), OURS[loss](engine="reference")
    _, stats = ours(v, labels, memory, ids=ids, return_stats=True)
    valid = float(stats.valid_negatives.sum() + stats.valid_positives.sum()) / (len(v) * len(bank))

    def step(loss_fn: Callable) -> Callable[[], None]:
        def call() -> None:
            v.grad = None
            loss_fn(v, labels, memory, ids=ids).backward()

        return call

    cases: dict[str, Callable[[], object]] = {"bare product": lambda: anchors @ bank.T, "ours": step(ours)}
    if loss != "triplet" or valid < 0.5:  # it materializes m·|P|·|N| differences
        cases["dense autograd"] = step(dense)
    if 0 < share < 0.5:  # theirs list every pair, which does not fit at 100 %
        cases |= peers(loss, v, labels, bank, row_labels)
    times = medians(cases, repeats=5 if len(cases) > 3 else 7)
    peaks = {name: peak_bytes(call) for name, call in cases.items() if name in ("ours", "dense autograd")}
    return [
        {
            "loss": loss, "valid": valid, "what": name, "ms": 1e3 * seconds, "ratio": seconds / times["bare product"],
            "ours_faster": seconds / times["ours"], "peak_mb": peaks.get(name, float("nan")) / 1e6,
        }
        for name, seconds in times.items()
    ]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row for loss in OURS for share in (0, 0.01, 1.0) for row in measure(loss, share)]


def main() -> None:
    title = f"one loss step, m {ANCHORS}, M {M_ROWS:,}, D {DIM}, fp32 · {machine()}"
    table = Table("loss", "valid pairs", "what", "ms", "× bare product", "× ours", "peak extra MB", title=title)
    for row in rows():
        peak = "" if row["peak_mb"] != row["peak_mb"] else f"{row['peak_mb']:.1f}"
        table.add_row(
            row["loss"], f"{100 * row['valid']:.2f} %", row["what"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}",
            f"{row['ours_faster']:.2f}", peak,
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
