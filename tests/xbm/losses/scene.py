"""Odd-shaped anchors and banks in which every special case occurs, shared by the tests of losses and engines."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm import CrossBatchMemory


class Scene(NamedTuple):
    anchors: Tensor  # (7, 19)
    labels: Tensor
    ids: Tensor
    memory: CrossBatchMemory  # 131 rows


def scene(seed=0, dtype=torch.float64, stored=None, update="queue", spread=0.9, **memory_options) -> Scene:
    """m 7, M 131, D 19: an anchor without positives, one whose positives are all its own copies, older copies of others.

    Anchor 0's id carries 5 rows of its own class and one of another; anchor 5 has a label of its own; anchor 6 sees only
    positives once `only_positives` turns all other rows into its class.
    """
    torch.manual_seed(seed)
    m, M, D = 7, 131, 19
    centres = torch.randn(5, D, dtype=torch.float64)
    row_labels = torch.randint(0, 5, (M,))
    rows = F.normalize(centres[row_labels] + spread * torch.randn(M, D, dtype=torch.float64))
    row_ids = torch.arange(M) + 1000 if update == "queue" else torch.randperm(M)
    labels = torch.tensor([0, 1, 2, 0, 1, 77, 88])
    anchors = F.normalize(centres[labels % 5] + spread * torch.randn(m, D, dtype=torch.float64))
    ids = torch.tensor([3, 5, 7, 3, 11, 13, 17])  # anchors 0 and 3 are two views of one image
    if update == "queue":
        row_ids[(row_labels == 0).nonzero()[:5, 0]] = 3
        row_ids[(row_labels == 2).nonzero()[:2, 0]] = 7
        row_ids[(row_labels == 4).nonzero()[0, 0]] = 5  # the same image under another label
        row_labels[40] = 88  # anchor 6's only positive is its own older copy
        row_ids[40] = 17
    memory = CrossBatchMemory(M, D, update, dtype=stored or dtype, **memory_options)
    memory.enqueue(rows.to(dtype), row_labels, row_ids)
    return Scene(anchors.to(dtype).requires_grad_(), labels, ids, memory)


def masks_by_hand(s: Scene, exclude: str) -> tuple[Tensor, Tensor]:
    """(m, M) twice, by plain loops."""
    row_labels, row_ids = s.memory.row_labels.tolist(), s.memory.row_ids.tolist()
    stamps = s.memory.stamps.tolist()
    m, M = len(s.labels), len(row_labels)
    positive, negative = torch.zeros(m, M, dtype=torch.bool), torch.zeros(m, M, dtype=torch.bool)
    pointer = int(s.memory.pointer)
    by_age = [(pointer + k) % M for k in range(M)]  # oldest first
    for i in range(m):
        copies = [j for j in by_age if row_ids[j] == int(s.ids[i]) and stamps[j] >= 0]
        barred = set(copies if exclude == "instance" else copies[-1:])
        for j in range(M):
            if j in barred or stamps[j] < 0:
                continue
            (positive if row_labels[j] == int(s.labels[i]) else negative)[i, j] = True
    return positive, negative
