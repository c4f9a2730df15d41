"""Finds likely label errors: images whose embeddings lie among those of other classes.

This needs a memory with one slot per image, which holds every class as a whole. A row with a likely wrong label is ignored, as
positive and as negative, until its image is written again, and the image itself does not train on that label. Nothing in here
waits for the device unless its docstring says so.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from xbm.errors import InputError
from xbm.memory import CrossBatchMemory

NEAREST = 0.1  # a label is likely wrong if its class is not among this share of the classes, the nearest ones
MOST = 0.25  # if a larger share of the rows looks wrong, the classes are not separated yet: none is ignored
FEW = 4  # classes with no more rows than this are left out: their mean says too little
IGNORED = -2  # the stamp of an ignored row
BLOCK = 1 << 24  # similarities computed at once


class LabelErrors(NamedTuple):
    """Rows whose labels are likely wrong, the most likely first."""

    rows: Tensor  # (k,), slots of the memory
    nearest: Tensor  # (k,), the class whose rows are most similar on average
    lead: Tensor  # (k,), by how much that similarity exceeds the one to the row's own class


@torch.no_grad()
def ignore_label_errors(memory: CrossBatchMemory, classes: int) -> None:
    """Marks the rows whose labels are likely wrong as ignored. Labels must satisfy 0 ≤ label < classes.

    Example:
        >>> memory = CrossBatchMemory(size=12, dim=2, update="moving_average")
        >>> rows = torch.eye(2)[[0] * 6 + [1] * 6]
        >>> memory.enqueue(rows, torch.tensor([0, 0, 0, 0, 0, 1] + [1] * 6), torch.arange(12))
        >>> ignore_label_errors(memory, classes=2)
        >>> len(memory), is_ignored(memory, torch.tensor([4, 5, 6])).tolist()
        (11, [False, True, False])
    """
    memory.stamps.copy_(torch.where(suspects(memory, classes), IGNORED, memory.stamps))
    memory.count.copy_((memory.stamps >= 0).sum())


def is_ignored(memory: CrossBatchMemory, ids: Tensor) -> Tensor:
    """(m,): whether the rows of the images with these ids are ignored."""
    return memory.stamps[ids] == IGNORED


def too_many(memory: CrossBatchMemory, classes: int) -> bool:
    """Whether so many labels look wrong that none is treated as wrong. Waits for the device."""
    misplaced = _misplaced(memory.rows.detach(), _labels(memory), classes)
    return bool(_too_many(misplaced, memory.stamps >= 0))


@torch.no_grad()
def find_label_errors(memory: CrossBatchMemory, classes: int) -> LabelErrors:
    """Lists likely label errors for a person to review, without rows that are nearest to their own class by now.

    Waits for the device.
    """
    valid, own = memory.stamps >= 0, memory.row_labels.clamp(min=0)
    leads, nearest_classes = [], []
    blocks, _ = _class_similarities(memory.rows.detach(), own, valid, classes)
    for similarity, to_own in blocks:
        largest, label = similarity.max(1)
        leads.append(largest - to_own[:, 0])
        nearest_classes.append(label)
    lead, nearest = torch.cat(leads), torch.cat(nearest_classes)
    suspect = suspects(memory, classes) & (lead > 0)
    rows = lead.where(suspect, -torch.inf).argsort(descending=True, stable=True)[: int(suspect.sum())]
    return LabelErrors(rows, nearest[rows], lead[rows])


@torch.no_grad()
def contradicted(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(n,): whether a row's own class is not among the nearest ones.

    The similarity to a class is the mean over its rows, without the row itself. Classes with few rows are left out.

    Args:
        rows: (n, D), of unit length.
        labels: (n,), 0 ≤ label < classes, or below 0 for rows that do not count.
    """
    misplaced = _misplaced(rows, labels, classes)
    return misplaced & ~_too_many(misplaced, labels >= 0)


def suspects(memory: CrossBatchMemory, classes: int) -> Tensor:
    """(M,): the rows that are ignored already, and those that would be now."""
    if memory.update == "queue":
        raise InputError("a queue has no slot per image: label errors are found with update=moving_average or backprop")
    return (memory.stamps == IGNORED) | contradicted(memory.rows.detach(), _labels(memory), classes)


def _labels(memory: CrossBatchMemory) -> Tensor:
    return memory.row_labels.where(memory.stamps >= 0, -1)


def _too_many(misplaced: Tensor, valid: Tensor) -> Tensor:
    return misplaced.sum() > MOST * valid.sum()


def _misplaced(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(n,): `contradicted`, however many rows there are."""
    valid, own = labels >= 0, labels.clamp(min=0)
    blocks, large = _class_similarities(rows, own, valid, classes)
    nearer = [(similarity > to_own).sum(1) for similarity, to_own in blocks]
    return valid & large[own] & (torch.cat(nearer) >= NEAREST * large.sum())


def _class_similarities(
    rows: Tensor, labels: Tensor, valid: Tensor, classes: int
) -> tuple[Iterator[tuple[Tensor, Tensor]], Tensor]:
    """Mean similarities to each class (b, classes) and to the own class (b, 1), in blocks of rows.

    The second value (classes,) says which classes have more than `FEW` rows: the similarity to the others is -inf.
    """
    block = max(1, BLOCK // classes)
    sums = torch.zeros(classes, rows.shape[1], device=rows.device)
    sizes = torch.zeros(classes, device=rows.device)
    for part, part_labels, part_valid in zip(rows.split(block), labels.split(block), valid.split(block)):
        member = one_hot(part_labels, classes).float() * part_valid[:, None]
        sums += member.T @ part.float()  # a product adds in the same order every time, unlike index_add on a GPU
        sizes += member.sum(0)
    large = sizes > FEW

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for part, part_labels, part_valid in zip(rows.split(block), labels.split(block), valid.split(block)):
            part = part.float()
            product = part @ sums.T  # (b, classes)
            to_own = product.gather(1, part_labels[:, None]) - (part**2).sum(1, keepdim=True) * part_valid[:, None]
            to_own = to_own / (sizes[part_labels] - part_valid.float()).clamp(min=1)[:, None]
            yield (product / sizes.clamp(min=1)).where(large, -torch.inf).scatter(1, part_labels[:, None], to_own), to_own

    return blocks(), large
