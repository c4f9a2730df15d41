"""The rank of every relevant gallery item of every query, by counting what comes before it instead of sorting.

A block of queries is multiplied with the whole gallery; the similarities of its relevant items are read from that product and
compared with the rest of it. With R relevant items a query that is R passes over the block, which for the few items that
retrieval benchmarks have costs less than the product. Above `SORT_ABOVE` relevant items one stable sort is cheaper.

Ties are settled by index at hardly any cost: the gallery is cut into strips of rows. In a strip that lies before the relevant
item an equal similarity counts (s ≥ t, which is s > the next float below t), behind it only a greater one does. Only the strip
that holds the item itself is looked at row by row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from xbm.retrieval.inputs import Sets
from xbm.retrieval.same_key import SameKey
from xbm.retrieval.similarity import GALLERY_MULTIPLE, QUERY_MULTIPLE, block_size, full_precision, padded

STRIP = GALLERY_MULTIPLE  # at most 255: a strip's count is kept in one byte
SORT_ABOVE = 128
S = TypeVar("S", bound=Sets)
NEVER = torch.iinfo(torch.int64).max  # the rank of an item that does not count


@dataclass(frozen=True, eq=False)
class Ranking:
    """What the ranks of each query's relevant items come to; all (Q,) on the CPU.

    Attributes:
        relevant: R, how many relevant items the query has; where it is 0 the others mean nothing.
        first: the rank of the best one, from 1.
        average_precision: the mean of the precision at each relevant item.
        average_precision_at_r: the same with 0 for items behind rank R.
        r_precision: the share of relevant items among the first R.
    """

    relevant: Tensor
    first: Tensor
    average_precision: Tensor
    average_precision_at_r: Tensor
    r_precision: Tensor


def rank(sets: S, ranks_of: Callable[[S, Tensor, Tensor, Tensor | None, int, "Work"], Tensor]) -> Ranking:
    """Ranks the gallery for every query. The device is waited for before the first block and after the last, not between.

    `ranks_of` meets a block of queries: the function of that name below, or `spread_ranks` for a gallery on many ranks.
    """
    device, gallery_rows = sets.labels.device, len(sets.gallery)
    exact = torch.float32 if device.type == "mps" else torch.float64
    relevant, excluded, most_excluded = SameKey(sets.labels, sets.gallery_labels), None, 0
    if sets.ids is not None and sets.gallery_ids is not None:
        excluded = SameKey(sets.ids, sets.gallery_ids)
        most_excluded = int(excluded.count.max())
    own = int(sets.gallery is sets.queries)  # each query finds itself among the rows of its label, and is excluded there
    widths, order = (relevant.count - own).sort(descending=True, stable=True)
    blocks = list(_blocks(widths.tolist(), gallery_rows, 12 * sets.copied + 32 * most_excluded))
    work = Work(max((length for _, length, width in blocks if width <= SORT_ABOVE), default=0) * gallery_rows, device)
    integers = torch.zeros(2, len(order), dtype=torch.int64, device=device)
    fractions = torch.zeros(3, len(order), dtype=exact, device=device)
    with full_precision(device):
        for start, length, width in blocks:
            block = order[start : start + length]
            queries = padded(block)
            candidates = relevant.rows(queries, width + own)
            left_out = excluded.rows(queries, most_excluded) if excluded else None
            ranks = ranks_of(sets, queries, candidates, left_out, width, work)[: len(block)]
            integers[:, block], fractions[:, block] = _summary(ranks, exact)
    found, first = integers.cpu()
    return Ranking(found, first, *fractions.cpu().double())


def _blocks(widths: list[int], gallery_rows: int, other_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Start, padded length and greatest number of relevant items of each block; widths fall, so blocks waste little."""
    start = 0
    while start < len(widths) and widths[start] > 0:
        width = widths[start]
        per_row = 48 if width > SORT_ABOVE else 6  # bytes: the product and what is made of it
        fits = block_size(per_row * gallery_rows + 128 * (width + 1) + other_bytes)
        length = min(fits, len(widths) - start)
        yield start, length + -length % QUERY_MULTIPLE, width
        start += length


class Work:
    """The two matrices of counting, taken once: the fresh pages of new ones for every block cost a tenth of its product."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.similarities = torch.empty(entries, device=device)
        self.greater = torch.empty(entries, dtype=torch.bool, device=device)


def ranks_of(sets: Sets, queries: Tensor, candidates: Tensor, left_out: Tensor | None, width: int, work: Work) -> Tensor:
    """(b, width) ranks, from 1, of the candidates that are not left out; `NEVER` where there are fewer.

    Args:
        queries: (b,) which ones.
        candidates: (b, width or more) gallery rows of the query's label, as `SameKey` gives them.
        left_out: (b, E) gallery rows of its id.
    """
    anchors, few = sets.queries[queries], width <= SORT_ABOVE  # (b, D)
    if few:  # gallery first: faster on CPUs, and counting down columns is as fast as along rows
        out = work.similarities[: len(sets.gallery) * len(anchors)].view(-1, len(anchors))
        S = torch.mm(sets.gallery, anchors.t(), out=out).t()  # (b, G)
    else:
        S = anchors @ sets.gallery.t()
    S[:, len(sets.gallery_labels) :] = -torch.inf
    again, first = sets.copies
    S[:, again] = S[:, first]
    if left_out is not None:
        S.scatter_(1, left_out, -torch.inf)
    threshold, kept = S.gather(1, candidates).topk(width, dim=1)
    items = candidates.gather(1, kept)
    before = count_before(S.t(), items, threshold, work.greater) if few else _sort_before(S, items)
    return (before + 1).masked_fill_(threshold == -torch.inf, NEVER)


def count_before(S: Tensor, items: Tensor, threshold: Tensor, work: Tensor) -> Tensor:
    """(b, R) how many rows of S, (G, b), come before each item, a row too, of similarity `threshold`."""
    strips = S.view(-1, STRIP, S.shape[1])  # (G / STRIP, STRIP, b)
    greater = work[: S.numel()].view_as(strips)
    number = torch.arange(len(strips), device=S.device)[:, None]
    inside = torch.arange(STRIP, device=S.device)
    query = torch.arange(S.shape[1], device=S.device)
    lower = threshold.nextafter(torch.full_like(threshold, -torch.inf))
    before = torch.empty_like(items)
    for r in range(items.shape[1]):
        home, place, t = items[:, r] // STRIP, items[:, r] % STRIP, threshold[:, r]
        least = torch.where(number < home, lower[:, r], t)  # (G / STRIP, b)
        torch.gt(strips, least[:, None], out=greater)
        # The bytes of eight queries are added at once as one integer: a strip is too short for a byte to overflow.
        counts = greater.view(torch.int64).sum(1).view(torch.uint8)  # (G / STRIP, b)
        tied = (strips[home, :, query] == t[:, None]) & (inside < place[:, None])  # (b, STRIP)
        before[:, r] = counts.sum(0) + tied.sum(1)
    return before


def _sort_before(S: Tensor, items: Tensor) -> Tensor:
    """The same for many items from S, (b, G)."""
    order = S.sort(dim=1, descending=True, stable=True).indices
    place = torch.arange(S.shape[1], device=S.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, place).gather(1, items)


def _summary(ranks: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """(2, b) number of relevant items and first rank; (3, b) average precision, the same up to rank R, R-precision."""
    ranks = ranks.sort(dim=1).values
    found = ranks < NEVER
    count = found.sum(1)
    place = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    precision = (place / ranks.to(exact)).masked_fill_(~found, 0)  # at each relevant item
    early = ranks <= count[:, None]
    sums = torch.stack([precision.sum(1), (precision * early).sum(1), early.sum(1).to(exact)])
    return torch.stack([count, ranks[:, 0]]), sums / count.clamp(min=1)
