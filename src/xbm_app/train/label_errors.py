"""Labels that the memory contradicts: it holds the whole of every class at once, so it can tell a row that lies among others'.

For memories with one slot an image. A row in doubt is set aside: it is nobody's positive or negative until its image is written
anew, and when that image is met again it should not learn from its label. Nothing here waits for the device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from xbm.errors import InputError
from xbm.memory import CrossBatchMemory

NEAREST = 0.1  # of the classes: a row is in doubt if its own is not among so many
MOST = 0.25  # of the rows that count: beyond that classes are not told apart, or too many labels are wrong: none is doubted
FEW = 4  # rows of a class: of one with no more nothing can be said
ASIDE = -2  # the stamp of a row that is set aside
BLOCK = 1 << 24  # similarities at once


class Doubted(NamedTuple):
    """Rows in doubt, the most doubtful first."""

    rows: Tensor  # (k,), their places in the memory
    nearest: Tensor  # (k,), the class whose rows are most like it on average
    lead: Tensor  # (k,), by how much they are more like it than those of its own class


@torch.no_grad()
def set_aside(memory: CrossBatchMemory, classes: int) -> None:
    """Sets aside the rows whose labels the others contradict. Labels are 0 ≤ label < classes.

    Example:
        >>> memory = CrossBatchMemory(size=12, dim=2, update="moving_average")
        >>> rows = torch.eye(2)[[0] * 6 + [1] * 6]
        >>> memory.enqueue(rows, torch.tensor([0, 0, 0, 0, 0, 1] + [1] * 6), torch.arange(12))
        >>> set_aside(memory, classes=2)
        >>> len(memory), aside(memory, torch.tensor([4, 5, 6])).tolist()
        (11, [False, True, False])
    """
    memory.stamps.copy_(torch.where(in_doubt(memory, classes), ASIDE, memory.stamps))
    memory.count.copy_((memory.stamps >= 0).sum())


def in_doubt(memory: CrossBatchMemory, classes: int) -> Tensor:
    """(M,): the rows that are set aside, and those that would be now."""
    if memory.update == "queue":
        raise InputError("a queue has no slot of an image's own: rows can be set aside with moving_average and backprop")
    return (memory.stamps == ASIDE) | contradicted(memory.rows.detach(), _labels(memory), classes)


def too_many(memory: CrossBatchMemory, classes: int) -> bool:
    """Whether so many rows lie among others' that none of them is doubted. Waits for the device."""
    found = _among_others(memory.rows.detach(), _labels(memory), classes)
    return bool(_too_many(found, memory.stamps >= 0))


def _labels(memory: CrossBatchMemory) -> Tensor:
    return memory.row_labels.where(memory.stamps >= 0, -1)


def aside(memory: CrossBatchMemory, ids: Tensor) -> Tensor:
    """(m,): which of the images with these ids have a row that is set aside."""
    return memory.stamps[ids] == ASIDE


@torch.no_grad()
def doubted(memory: CrossBatchMemory, classes: int) -> Doubted:
    """The rows in doubt for a person to look at, less those that lie among their own class by now. Waits for the device."""
    counts, own = memory.stamps >= 0, memory.row_labels.clamp(min=0)
    leads, classes_of = [], []
    blocks, _ = _nearness(memory.rows.detach(), own, counts, classes)
    for near, mine in blocks:
        most, which = near.max(1)
        leads.append(most - mine[:, 0])
        classes_of.append(which)
    lead, nearest = torch.cat(leads), torch.cat(classes_of)
    found = in_doubt(memory, classes) & (lead > 0)
    index = lead.where(found, -torch.inf).argsort(descending=True, stable=True)[: int(found.sum())]
    return Doubted(index, nearest[index], lead[index])


@torch.no_grad()
def contradicted(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(n,): whether a row's own class is not among the nearest ones.

    A class is as near as its rows are on average, the row itself left out. Classes of few rows are left out of it all.

    Args:
        rows: (n, D), of unit length.
        labels: (n,), 0 ≤ label < classes, or below 0 for rows that do not count.
    """
    found = _among_others(rows, labels, classes)
    return found & ~_too_many(found, labels >= 0)


def _too_many(found: Tensor, counts: Tensor) -> Tensor:
    return found.sum() > MOST * counts.sum()


def _among_others(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(n,): the same, however many there are."""
    counts, own = labels >= 0, labels.clamp(min=0)
    blocks, several = _nearness(rows, own, counts, classes)
    nearer = [(near > mine).sum(1) for near, mine in blocks]
    return counts & several[own] & (torch.cat(nearer) >= NEAREST * several.sum())


def _nearness(rows: Tensor, labels: Tensor, counts: Tensor, classes: int) -> tuple[Iterator[tuple[Tensor, Tensor]], Tensor]:
    """For blocks of rows how near each class is (b, classes), and their own (b, 1).

    And which classes have more than few rows (classes,): the others are as far as can be.
    """
    block = max(1, BLOCK // classes)
    sums = torch.zeros(classes, rows.shape[1], device=rows.device)
    sizes = torch.zeros(classes, device=rows.device)
    for some, of, there in zip(rows.split(block), labels.split(block), counts.split(block)):
        member = one_hot(of, classes).float() * there[:, None]
        sums += member.T @ some.float()  # a product adds in the same order every time, unlike index_add on a GPU
        sizes += member.sum(0)
    several = sizes > FEW

    def each() -> Iterator[tuple[Tensor, Tensor]]:
        for some, of, there in zip(rows.split(block), labels.split(block), counts.split(block)):
            some = some.float()
            product = some @ sums.T  # (b, classes)
            mine = product.gather(1, of[:, None]) - (some**2).sum(1, keepdim=True) * there[:, None]
            mine = mine / (sizes[of] - there.float()).clamp(min=1)[:, None]
            yield (product / sizes.clamp(min=1)).where(several, -torch.inf).scatter(1, of[:, None], mine), mine

    return each(), several
