"""The order of the gallery for each query: the exact rank of every relevant item, and the k nearest rows.

Relevant items are ranked by counting the items before them instead of sorting. A block of queries is multiplied with the whole
gallery. The similarities of the relevant items are read from that product and compared with the rest of it. With R relevant
items per query this takes R passes over the block, which for the few items of retrieval benchmarks costs less than the product
itself. Above `SORT_ABOVE` relevant items one stable sort is cheaper.

Ties are resolved by index at almost no cost: the gallery is cut into strips of rows. In a strip before the relevant item an
equal similarity counts (s ≥ t, that is, s > the next float below t); in a strip after it only a greater one does. Only the
strip that holds the item is inspected row by row.

With a gallery that is distributed over ranks, the rank that holds an item reports its similarity, and every rank counts among
its own rows. Rows of earlier ranks precede the item in the whole gallery and count when equal, those of later ranks do not.
Counts are integers, so their sums, and every score computed from them, equal those of a single process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.similarity import (
    GALLERY_MULTIPLE,
    QUERY_MULTIPLE,
    Comparison,
    SameKey,
    Sets,
    Shard,
    at_least_one,
    block_size,
    full_precision,
    padded_queries,
    read_keys,
    read_shard,
)

STRIP = GALLERY_MULTIPLE  # at most 255: the count of a strip is kept in one byte
SORT_ABOVE = 128
NEVER = torch.iinfo(torch.int64).max  # the rank of an item that does not count
LOW = 2**32 - 1  # the lower half of a sort key of `nearest`


@dataclass(frozen=True, eq=False)
class Ranking:
    """Summary of the ranks of each query's relevant items; all (Q,) on the CPU.

    Attributes:
        relevant: R, the number of relevant items; where it is 0 the other values are meaningless.
        first: rank of the best one, from 1.
        average_precision: mean of the precision at each relevant item.
        average_precision_at_r: the same with 0 for items after rank R.
        r_precision: fraction of relevant items among the first R.
    """

    relevant: Tensor
    first: Tensor
    average_precision: Tensor
    average_precision_at_r: Tensor
    r_precision: Tensor


def rank(sets: Sets) -> Ranking:
    """Ranks the gallery for every query. The device is synchronized before the first block and after the last, not between."""
    comparison = sets.comparison
    device, gallery_rows = sets.labels.device, len(comparison.gallery.rows)
    exact = torch.float32 if device.type == "mps" else torch.float64
    relevant, same_id, most_excluded = SameKey(sets.labels, sets.gallery_labels), None, 0
    if sets.ids is not None and sets.gallery_ids is not None:
        same_id = SameKey(sets.ids, sets.gallery_ids)
        most_excluded = int(same_id.count.max())
    own = int(comparison.gallery is comparison.queries)  # each query is among the rows of its label, and is excluded there
    widths, order = (relevant.count - own).sort(descending=True, stable=True)
    blocks = list(_blocks(widths.tolist(), gallery_rows, 12 * comparison.copies + 32 * most_excluded))
    buffers = Buffers(max((length for _, length, width in blocks if width <= SORT_ABOVE), default=0) * gallery_rows, device)
    integers = torch.zeros(2, len(order), dtype=torch.int64, device=device)
    fractions = torch.zeros(3, len(order), dtype=exact, device=device)
    with full_precision(device):
        for start, length, width in blocks:
            block = order[start : start + length]
            queries = padded_queries(block)
            candidates = relevant.rows(queries, width + own)
            excluded = same_id.rows(queries, most_excluded) if same_id else None
            ranks = _rank_block(comparison, queries, candidates, excluded, width, buffers)[: len(block)]
            integers[:, block], fractions[:, block] = _summary(ranks, exact)
    count, first = integers.cpu()
    return Ranking(count, first, *fractions.cpu().double())


def _blocks(widths: list[int], gallery_rows: int, other_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, padded length and largest number of relevant items of each block; widths must be descending."""
    start = 0
    while start < len(widths) and widths[start] > 0:
        width = widths[start]
        per_row = 48 if width > SORT_ABOVE else 6  # bytes: the product and what is derived from it
        fits = block_size(per_row * gallery_rows + 128 * (width + 1) + other_bytes)
        length = min(fits, len(widths) - start)
        yield start, length + -length % QUERY_MULTIPLE, width
        start += length


class Buffers:
    """The two matrices of counting, allocated once: fresh pages for every block would cost a tenth of its product."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.similarities = torch.empty(entries, device=device)
        self.greater = torch.empty(entries, dtype=torch.bool, device=device)


def _rank_block(
    comparison: Comparison, queries: Tensor, candidates: Tensor, excluded: Tensor | None, width: int, buffers: Buffers
) -> Tensor:
    """Returns (b, width) ranks, from 1, of the candidates that are not excluded; `NEVER` where there are fewer.

    Args:
        queries: (b,) indices of queries.
        candidates: (b, width or more) indices of gallery rows with the query's label, as `SameKey` returns them.
        excluded: (b, E) indices of gallery rows with the query's id.
    """
    shard, few = comparison.gallery, width <= SORT_ABOVE
    out = buffers.similarities[: len(shard.rows) * len(queries)].view(-1, len(queries)) if few else None
    S = comparison.similarities(queries, excluded, out)  # (b, G)
    similarity = shard.ranks.maximum(S.gather(1, shard.local(candidates)), "similarities of relevant items")
    threshold, kept = similarity.topk(width, dim=1)
    items = candidates.gather(1, kept)
    if few:
        # An item of an earlier rank is replaced by the first row, which nothing precedes; one of a later rank by the last row,
        # which is padding.
        position = (items - shard.start).clamp(0, len(shard.rows) - 1)
        before = _count_before(S.t(), position, threshold, buffers.greater)
    else:
        before = _sort_before(S, items, threshold, shard)
    return (shard.ranks.sum(before, "ranks of relevant items") + 1).masked_fill_(threshold == -torch.inf, NEVER)


def _count_before(S: Tensor, items: Tensor, threshold: Tensor, greater: Tensor) -> Tensor:
    """(b, R): how many rows of S, (G, b), precede each item, itself a row, of similarity `threshold`."""
    strips = S.view(-1, STRIP, S.shape[1])  # (G / STRIP, STRIP, b)
    greater = greater[: S.numel()].view_as(strips)
    strip = torch.arange(len(strips), device=S.device)[:, None]
    row = torch.arange(STRIP, device=S.device)
    query = torch.arange(S.shape[1], device=S.device)
    lower = threshold.nextafter(torch.full_like(threshold, -torch.inf))
    before = torch.empty_like(items)
    for r in range(items.shape[1]):
        home, position, t = items[:, r] // STRIP, items[:, r] % STRIP, threshold[:, r]
        least = torch.where(strip < home, lower[:, r], t)  # (G / STRIP, b)
        torch.gt(strips, least[:, None], out=greater)
        # The bytes of eight queries are added at once as one integer: a strip is too short for a byte to overflow.
        counts = greater.view(torch.int64).sum(1).view(torch.uint8)  # (G / STRIP, b)
        tied = (strips[home, :, query] == t[:, None]) & (row < position[:, None])  # (b, STRIP)
        before[:, r] = counts.sum(0) + tied.sum(1)
    return before


def _sort_before(S: Tensor, items: Tensor, threshold: Tensor, shard: Shard) -> Tensor:
    """The same for many items, given as indices in the whole gallery, from S, (b, G)."""
    values, order = S.sort(dim=1, descending=True, stable=True)
    position = torch.arange(S.shape[1], device=S.device).expand_as(order)
    local = shard.local(items)
    before = torch.empty_like(order).scatter_(1, order, position).gather(1, local)
    if shard.count == shard.total:
        return before
    ascending = values.flip(1).contiguous()
    greater, no_less = (S.shape[1] - torch.searchsorted(ascending, threshold, right=right) for right in (True, False))
    return torch.where(local < shard.count, before, torch.where(items < shard.start, greater, no_less))


def _summary(ranks: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (2, b) number of relevant items and first rank; (3, b) average precision, the same up to rank R, R-precision."""
    ranks = ranks.sort(dim=1).values
    relevant = ranks < NEVER
    count = relevant.sum(1)
    position = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    precision = (position / ranks.to(exact)).masked_fill_(~relevant, 0)  # at each relevant item
    early = ranks <= count[:, None]
    sums = torch.stack([precision.sum(1), (precision * early).sum(1), early.sum(1).to(exact)])
    return torch.stack([count, ranks[:, 0]]), sums / count.clamp(min=1)


# ------------------------------------------------------------------ nearest neighbours


def nearest(
    query: Any, gallery: Any, k: int, query_ids: Any = None, gallery_ids: Any = None, ranks: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """Finds the k most similar gallery rows of each query, best first. Of equal rows the lower index comes first.

    Similarity is the cosine, as in `evaluate`. If both ids are given, rows with the query's own id are excluded; unused places
    hold index -1 and similarity -inf. The work space is bounded as in `evaluate`.

    Args:
        query: (Q, D) tensor or array of any float type.
        gallery: (G, D) tensor or array of any float type.
        k: number of neighbours; at most the whole gallery is returned.
        query_ids: (Q,) integers or text.
        gallery_ids: (G,) integers or text.
        ranks: as in `evaluate`: each rank passes its own rows and all ids, and gets the neighbours of all queries.

    Returns:
        Similarities (Q, min(k, G)) float32 and indices into the gallery, int64, on the device of `query`.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 2.0]])
        >>> nearest(x, x, k=2, query_ids=range(4), gallery_ids=range(4))[1].tolist()
        [[2, 1], [3, 2], [1, 3], [1, 2]]
    """
    k, ranks = at_least_one("k", k), Ranks.alone() if ranks is None else ranks
    if (query_ids is None) != (gallery_ids is None):
        raise InputError("pass both query_ids and gallery_ids, or neither")
    queries = read_shard(ranks, "query", query)
    shard = queries if gallery is query else read_shard(ranks, "gallery", gallery, queries)
    ids, other_ids = read_keys(("query_ids", "gallery_ids"), query_ids, gallery_ids, queries, shard)
    same_id = None if ids is None or other_ids is None else SameKey(ids, other_ids)
    most_excluded = int(same_id.count.max()) if same_id else 0
    comparison, k, device = Comparison(queries, shard), min(k, shard.total), queries.rows.device
    best = torch.empty(queries.total, k, dtype=torch.int64, device=device)  # sort keys
    low = LOW - (shard.start + torch.arange(len(shard.rows), device=device)).clamp(max=shard.total)
    step = block_size(40 * len(shard.rows) + 32 * k * ranks.world + 32 * most_excluded + 12 * comparison.copies)
    with full_precision(device):
        for start in range(0, queries.total, step):
            block = torch.arange(start, min(start + step, queries.total), device=device)
            indices = padded_queries(block)
            S = comparison.similarities(indices, same_id.rows(indices, most_excluded) if same_id else None)
            keys = sort_keys(S, low).topk(min(k, S.shape[1]), dim=1).values[: len(block)]
            candidates = ranks.stack(keys, "neighbours").transpose(0, 1).flatten(1)  # (b, R · k)
            best[block] = candidates.topk(k, dim=1).values
    similarity = key_similarities(best)
    return similarity, (LOW - (best & LOW)).masked_fill_(similarity == -torch.inf, -1)


def sort_keys(S: Tensor, low: Tensor) -> Tensor:
    """Combines float32 similarities (b, G) and row indices into int64 keys that are larger for what comes first.

    No two keys are equal, so the order does not depend on how topk resolves ties. `low` (G,) is `LOW` minus the index of each
    row. Floats are ordered like their bits once those of negative ones are inverted. Adding 0 makes -0 equal to 0.
    """
    return _inverted((S + 0.0).view(torch.int32)).to(torch.int64).bitwise_left_shift_(32).add_(low)


def key_similarities(keys: Tensor) -> Tensor:
    """The float32 similarities that the keys were made from."""
    return _inverted((keys >> 32).to(torch.int32)).view(torch.float32)


def _inverted(bits: Tensor) -> Tensor:
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
