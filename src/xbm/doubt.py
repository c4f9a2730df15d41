"""Labels that the memory contradicts: it holds the whole of every class at once, so it can tell a row that lies among others'.

For memories with one slot an image. A row in doubt is set aside: it is nobody's positive or negative until its image is written
anew, and when that image is met again it should not learn from its label. Nothing here waits for the device.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from xbm.errors import InputError
from xbm.memory import CrossBatchMemory

NEAREST = 0.1  # of the classes: a row is in doubt if its own is not among so many
MOST = 0.25  # of the rows that count: if more than so many are, the embeddings do not tell classes apart yet, and none is
FEW = 4  # rows of a class: of one with no more nothing can be said
ASIDE = -2  # the stamp of a row that is set aside
BLOCK = 1 << 24  # similarities at once


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
    labels = memory.row_labels.where(memory.stamps >= 0, -1)
    return (memory.stamps == ASIDE) | contradicted(memory.rows.detach(), labels, classes)


def aside(memory: CrossBatchMemory, ids: Tensor) -> Tensor:
    """(m,): which of the images with these ids have a row that is set aside."""
    return memory.stamps[ids] == ASIDE


@torch.no_grad()
def contradicted(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(n,): whether a row's own class is not among the nearest ones.

    A class is as near as its rows are on average, the row itself left out. Classes of few rows are left out of it all.

    Args:
        rows: (n, D), of unit length.
        labels: (n,), 0 ≤ label < classes, or below 0 for rows that do not count.
    """
    counts, own = labels >= 0, labels.clamp(min=0)
    block = max(1, BLOCK // classes)
    sums = torch.zeros(classes, rows.shape[1], device=rows.device)
    sizes = torch.zeros(classes, device=rows.device)
    for some, of, there in zip(rows.split(block), own.split(block), counts.split(block)):
        member = one_hot(of, classes).float() * there[:, None]
        sums += member.T @ some.float()  # a product adds in the same order every time, unlike index_add on a GPU
        sizes += member.sum(0)
    several = sizes > FEW
    nearer = []
    for some, of in zip(rows.split(block), own.split(block)):
        some = some.float()
        product = some @ sums.T  # (b, classes)
        mine = product.gather(1, of[:, None]) - (some**2).sum(1, keepdim=True)
        mine = mine / (sizes[of, None] - 1).clamp(min=1)
        near = (product / sizes.clamp(min=1)).where(several, -torch.inf).scatter(1, of[:, None], mine)
        nearer.append((near > mine).sum(1))
    doubted = counts & several[own] & (torch.cat(nearer) >= NEAREST * several.sum())
    return doubted & (doubted.sum() <= MOST * counts.sum())
