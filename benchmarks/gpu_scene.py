"""Inputs for the GPU benchmarks: memories in which a step has a few thousand valid negatives, scattered over all rows."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm import ContrastiveLoss, CrossBatchMemory, MultiSimilarityLoss, TripletLoss
from xbm.losses import PairLoss

ANCHORS, PER_CLASS = 64, 5
LOSSES = {"contrastive": ContrastiveLoss, "multi_similarity": MultiSimilarityLoss, "triplet": TripletLoss}
EVERY_PAIR: dict[str, dict[str, float]] = {
    "contrastive": {"margin": -2.0},
    "multi_similarity": {"epsilon": 4.0},
    "triplet": {"margin": 4.0},
}


class Scene(NamedTuple):
    anchors: Tensor  # (64, D), float32
    labels: Tensor
    ids: Tensor
    memories: list[CrossBatchMemory]  # several, so that none stays in the cache


def scene(M: int, D: int, banks: int, dtype: torch.dtype = torch.bfloat16, near: int = 700) -> Scene:
    """Draws 16 classes of 4 anchors, 5 positives per class, `near` rows of other classes close to some class, and random rows.

    A near row is a valid negative of about the 4 anchors of its class for any of the three losses.
    """
    torch.manual_seed(0)
    centres = unit(torch.randn(16, D))
    which = torch.arange(ANCHORS, device="cuda") // 4
    anchors = unit(centres[which] + 0.25 * unit(torch.randn(ANCHORS, D)))
    memories = []
    for _ in range(banks):
        memory = CrossBatchMemory(M, D, dtype=dtype, device="cuda")
        for start in range(0, M, 1 << 20):
            rows = memory.rows[start : start + (1 << 20)]
            rows.copy_(unit(torch.randn(len(rows), D)))
        labels = 16 + torch.arange(M, device="cuda") // PER_CLASS
        slots = torch.randperm(M, device="cuda")[: 16 * PER_CLASS + near]
        classes = torch.arange(len(slots), device="cuda") % 16
        memory.rows[slots] = unit(centres[classes] + 1.05 * unit(torch.randn(len(slots), D))).to(dtype)
        labels[slots[: 16 * PER_CLASS]] = classes[: 16 * PER_CLASS]
        memory.row_labels.copy_(labels)
        memory.row_ids.copy_(torch.arange(M))
        memory.stamps.fill_(1)
        memory.count.fill_(M)
        memory.clock.fill_(1)
        memories.append(memory)
    return Scene(anchors, which, M + torch.arange(ANCHORS, device="cuda"), memories)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x.to("cuda"), dim=1)


def dense_step(loss: PairLoss, v: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor) -> Tensor:
    """The plain formula over the whole matrix in float32 with autograd: the straightforward implementation."""
    S = v @ rows.T
    same = labels[:, None] == row_labels
    return loss.dense(S, same, ~same).sum() / len(v)


def loop_step(margin: float, v: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor) -> Tensor:
    """The contrastive loss as a loop over the anchors that selects pairs, which synchronizes with the device."""
    S = v @ rows.T
    total = v.new_zeros(())
    for i in range(len(v)):
        positive = torch.masked_select(S[i], row_labels == labels[i])
        negative = torch.masked_select(S[i], row_labels != labels[i])
        positive = torch.masked_select(positive, positive < 1 - 1e-5)
        negative = torch.masked_select(negative, negative > margin)
        if len(negative) > 0:
            total = total + negative.sum() - margin * len(negative)
        total = total + (1 - positive).sum()
    return total / len(v)
