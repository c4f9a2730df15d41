"""Queries and a gallery that are spread over the ranks: each holds consecutive rows, in the order of the ranks.

Nobody ever has all embeddings. The rows of a block of queries are sent to all, every rank multiplies them with its own part of
the gallery, and what is exchanged of that is small. Labels and ids, a few bytes a row, are known to all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.copies import row_hashes
from xbm.retrieval.inputs import Sets, read_embeddings, read_keys
from xbm.retrieval.similarity import GALLERY_MULTIPLE, unit_rows


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's rows of a set.

    Attributes:
        rows: (n + padding, D) float32 unit rows, the last of them zeros; equally many on every rank.
        start: the number of the first one in the whole set; `count`: n; `total`: the rows of the whole set.
    """

    rows: Tensor
    start: int
    count: int
    total: int
    ranks: Ranks

    def here(self, numbers: Tensor) -> Tensor:
        """The place in `rows` of the rows of these numbers; that of a row of zeros where another rank has them."""
        local = numbers - self.start
        return local.masked_fill((local < 0) | (local >= self.count), len(self.rows) - 1)

    def fetch(self, numbers: Tensor) -> Tensor:
        """(b, D): the rows of these numbers, whoever has them."""
        return self.ranks.sum(self.rows[self.here(numbers)], "queries")


@dataclass(frozen=True, eq=False)
class Meeting:
    """How blocks of queries, wherever they lie, meet this rank's part of the gallery.

    Attributes:
        copies: rows of this part that repeat an earlier one of it, and which one, as places: (C,) each.
        told: (F,) numbers of gallery rows with copies on other ranks than their own.
        copies_of_told: rows of this part that repeat one of them, and which, as places in `gallery.rows` and in `told`.
        copied: how many copies all ranks have.
    """

    queries: Part
    gallery: Part
    copies: tuple[Tensor, Tensor]
    told: Tensor
    copies_of_told: tuple[Tensor, Tensor]
    copied: int

    def similarities(self, queries: Tensor, left_out: Tensor | None, out: Tensor | None = None) -> Tensor:
        """(b, G/R + padding): the queries of these numbers and this rank's rows; −inf for rows left out and for padding."""
        part = self.gallery
        S = torch.mm(part.rows, self.queries.fetch(queries).t(), out=out).t()
        S[:, part.count :] = -torch.inf
        again, first = self.copies
        S[:, again] = S[:, first]
        if len(self.told):  # a copy has the similarity that the owner of the first one found, to the last bit
            values = part.ranks.maximum(S[:, part.here(self.told)], "copies")  # (b, F)
            again, which = self.copies_of_told
            S[:, again] = values[:, which]
        if left_out is not None:
            S.scatter_(1, part.here(left_out), -torch.inf)
        return S


def meeting_of(queries: Part, gallery: Part) -> Meeting:
    again, first = _copies(gallery)
    starts = gallery.ranks.stack(torch.tensor([gallery.start]), "sizes").flatten().to(again.device)
    apart = torch.bucketize(again, starts, right=True) != torch.bucketize(first, starts, right=True)
    told = first[apart].unique()
    mine = gallery.here(again) < gallery.count
    own, others = mine & ~apart, mine & apart
    copies = gallery.here(again[own]), gallery.here(first[own])
    copies_of_told = gallery.here(again[others]), torch.searchsorted(told, first[others])
    return Meeting(queries, gallery, copies, told, copies_of_told, len(again))


@dataclass(frozen=True, eq=False)
class SpreadSets(Sets):
    """`Sets` whose embeddings are this rank's; labels and ids are those of all rows."""

    meeting: Meeting

    @property
    def copied(self) -> int:
        return self.meeting.copied + len(self.meeting.told)


def read_spread(
    ranks: Ranks, embeddings: Any, labels: Any, gallery: Any = None, gallery_labels: Any = None, ids: Any = None,
    gallery_ids: Any = None,
) -> SpreadSets:  # fmt: skip
    """The arguments of `xbm.retrieval.evaluate`, checked: embeddings of this rank's rows, labels and ids of all rows."""
    queries, part = read_parts(ranks, embeddings, embeddings if gallery is None else gallery)
    device = queries.rows.device
    if gallery is None:
        ids = torch.arange(queries.total) if ids is None else ids
        gallery_labels, gallery_ids = labels, ids
    query_labels, other_labels = read_keys("labels", labels, gallery_labels, device)
    query_ids, other_ids = read_keys("ids", ids, gallery_ids, device)
    assert query_labels is not None and other_labels is not None
    for keys, of in ((query_labels, queries), (query_ids, queries), (other_labels, part), (other_ids, part)):
        same_total(keys, of)
    return SpreadSets(
        queries=queries.rows, gallery=part.rows, copies=(query_labels[:0], query_labels[:0]), labels=query_labels,
        gallery_labels=other_labels, ids=query_ids, gallery_ids=other_ids, meeting=meeting_of(queries, part),
    )  # fmt: skip


def read_parts(ranks: Ranks, queries: Any, gallery: Any) -> tuple[Part, Part]:
    """Both; the same object where the gallery is the queries."""
    part = read_part(ranks, "embeddings", queries)
    searched = part if gallery is queries else read_part(ranks, "gallery", gallery, part.rows.device)
    if part.rows.shape[1] != searched.rows.shape[1]:
        raise InputError(f"embeddings are {part.rows.shape[1]}-d and the gallery is {searched.rows.shape[1]}-d: use one model")
    return part, searched


def same_total(keys: Tensor | None, part: Part) -> None:
    if keys is not None and len(keys) != part.total:
        raise InputError(f"{len(keys)} labels or ids for {part.total} rows: give those of all ranks' rows, on every rank")


def read_part(ranks: Ranks, name: str, values: Any, device: torch.device | None = None) -> Part:
    """A rank may have no rows; all of them together must have some. What is wrong on one rank is refused on all."""
    rows = torch.as_tensor(values)
    rows = read_embeddings(name, rows) if len(rows) else rows
    rows = rows if device is None else rows.to(device)
    unit, finite = unit_rows(rows)
    about = ranks.stack(torch.tensor([len(rows), rows.shape[1], finite]), "sizes").tolist()  # (R, 3)
    sizes = [size for size, _, _ in about]
    if sum(sizes) == 0 or len({dim for _, dim, _ in about}) > 1:
        shapes = [tuple(each[:2]) for each in about]
        raise InputError(f"the ranks' parts of {name} have the shapes {shapes}: give some rows, of one dimension")
    if not all(finite for _, _, finite in about):
        raise InputError(f"{name} holds NaN or infinity: leave those rows out, or look for the step where the model diverged")
    longest = (max(sizes) // GALLERY_MULTIPLE + 1) * GALLERY_MULTIPLE
    even = torch.cat([unit, unit.new_zeros(longest - len(unit), unit.shape[1])]) if len(unit) < longest else unit
    return Part(even, sum(sizes[: ranks.rank]), len(rows), sum(sizes), ranks)


def _copies(part: Part) -> tuple[Tensor, Tensor]:
    """Numbers of the rows that repeat an earlier one, on whatever rank, and of that one: told by 128 bits of hash."""
    hashes = torch.stack([row_hashes(part.rows[: part.count], seed) for seed in (0, 1)], dim=1)
    everyone = torch.cat(part.ranks.everyone(hashes, "copies"))  # (N, 2)
    group = everyone.unique(dim=0, return_inverse=True)[1]
    number = torch.arange(part.total, device=group.device)
    first = torch.full_like(number, part.total).scatter_reduce(0, group, number, "amin")[group]
    again = (first < number).nonzero()[:, 0]
    return again, first[again]
