"""Cosine similarities between blocks of queries and the gallery, in full float32 precision and bounded memory.

With several processes each rank holds consecutive rows of the queries and of the gallery, in rank order, and no rank ever holds
all embeddings. The rows of a block of queries are sent to every rank, and each rank multiplies them with its own shard of the
gallery. A single process is the case of one shard.

The caller's arguments are checked here too, and converted to one form: unit rows and int64 keys on one device.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xbm.checks import plain_integer
from xbm.distributed import Ranks
from xbm.distributed.ranks import padded
from xbm.errors import InputError

WORK_BYTES = 256 * 2**20  # work space beside one float32 copy of the embeddings; never less than a block of 8 queries

QUERY_MULTIPLE = 8  # counting packs the bytes of eight queries into one integer
GALLERY_MULTIPLE = 64  # and walks the gallery in strips of this many rows


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's consecutive rows of a set of embeddings.

    Attributes:
        rows: (n + padding, D) float32 unit rows. The padding rows are zero; there is at least one. Same shape on every rank.
        start: index of the first row in the whole set.
        count: n, the rows on this rank.
        total: the rows on all ranks.
        ranks: the processes over which the set is distributed.
    """

    rows: Tensor
    start: int
    count: int
    total: int
    ranks: Ranks

    def local(self, indices: Tensor) -> Tensor:
        """Converts indices in the whole set to positions in `rows`; rows of other ranks become the last padding row."""
        local = indices - self.start
        return local.masked_fill((local < 0) | (local >= self.count), len(self.rows) - 1)

    def fetch(self, indices: Tensor) -> Tensor:
        """(b, D): the rows at these indices of the whole set, from the ranks that hold them."""
        return self.ranks.sum(self.rows[self.local(indices)], "queries")


class Comparison:
    """Compares blocks of queries, from any rank, with this rank's shard of the gallery.

    Gallery rows that are equal bit for bit always get the same similarity. A matrix product may sum the entries near its edge
    in a different order than those in its middle, so two copies of an image could differ in the last bit and be ranked by
    chance. The similarities of the first copy are therefore written over those of the others.

    Attributes:
        copies: number of gallery columns that are overwritten or exchanged because of copies, for the work space.
    """

    def __init__(self, queries: Shard, gallery: Shard) -> None:
        self.queries, self.gallery = queries, gallery
        again, first = _find_copies_on_all_ranks(gallery)
        starts = gallery.ranks.stack(torch.tensor([gallery.start]), "sizes").flatten().to(again.device)
        apart = torch.bucketize(again, starts, right=True) != torch.bucketize(first, starts, right=True)
        here = gallery.local(again) < gallery.count
        same_rank, other_rank = here & ~apart, here & apart
        self._local_copies = gallery.local(again[same_rank]), gallery.local(first[same_rank])
        self._originals = first[apart].unique()  # rows with copies on another rank, as indices in the whole gallery
        self._remote_copies = gallery.local(again[other_rank]), torch.searchsorted(self._originals, first[other_rank])
        self.copies = len(again) + len(self._originals)

    def similarities(self, queries: Tensor, excluded: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Returns (b, n + padding) similarities of these queries; -inf for padding and for excluded rows.

        Args:
            queries: (b,) indices of queries.
            excluded: (b, E) indices of gallery rows; indices past the end are ignored.
            out: (n + padding, b) receives the product. With the gallery first it is faster on CPUs.
        """
        gallery, anchors = self.gallery, self.queries.fetch(queries)  # (b, D)
        S = anchors @ gallery.rows.t() if out is None else torch.mm(gallery.rows, anchors.t(), out=out).t()
        S[:, gallery.count :] = -torch.inf
        again, first = self._local_copies
        S[:, again] = S[:, first]
        if len(self._originals):
            values = gallery.ranks.maximum(S[:, gallery.local(self._originals)], "copies")  # (b, originals)
            again, original = self._remote_copies
            S[:, again] = values[:, original]
        if excluded is not None:
            S.scatter_(1, gallery.local(excluded), -torch.inf)
        return S


class SameKey:
    """Finds the gallery rows that share each query's label or id, by one sort of the keys instead of a Q × G comparison.

    Attributes:
        count: (Q,) number of such rows.

    Example:
        >>> same = SameKey(torch.tensor([5, 7, 6]), torch.tensor([7, 5, 7]))
        >>> same.rows(torch.arange(3), width=2).tolist()  # 3 is past the last row and pads the result
        [[1, 3], [0, 2], [3, 3]]
    """

    def __init__(self, keys: Tensor, gallery_keys: Tensor) -> None:
        ordered, self.order = gallery_keys.sort(stable=True)
        self.start = torch.searchsorted(ordered, keys)  # (Q,)
        self.count = torch.searchsorted(ordered, keys, right=True) - self.start
        self.padding = len(gallery_keys)

    def rows(self, queries: Tensor, width: int) -> Tensor:
        """(b, width) gallery rows for the queries at these indices (b,), in order, padded with the number of rows."""
        position = torch.arange(width, device=queries.device)
        rows = self.order[(self.start[queries, None] + position).clamp_(max=self.padding - 1)]
        return rows.masked_fill_(position >= self.count[queries, None], self.padding)


# ---------------------------------------------------------------- rows


def unit_rows(embeddings: Tensor) -> tuple[Tensor, bool]:
    """Normalizes rows in float32, pads them with zero rows, and reports whether all entries are finite.

    The padding completes the last `GALLERY_MULTIPLE` rows and is never empty, so there is always a row that matches nothing.
    A row of zeros has no direction and stays zero: its similarity to everything is 0.

    Args:
        embeddings: (N, D) of any float type.

    Returns:
        (N + padding, D) float32, and a flag.
    """
    count, dim = embeddings.shape
    unit = torch.zeros(padded_count(count), dim, dtype=torch.float32, device=embeddings.device)
    finite = torch.ones((), dtype=torch.bool, device=embeddings.device)
    step = max(1, WORK_BYTES // (4 * 8 * dim))
    for start in range(0, count, step):
        rows = embeddings[start : start + step]
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # Squares of entries beyond 1e19 or below 1e-23 leave float32's range, so divide by the largest first.
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        finite &= torch.isfinite(largest).all()
        rows = rows / largest.masked_fill(largest == 0, 1)
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        unit[start : start + len(rows)] = rows / length.masked_fill(length == 0, 1)
    return unit, bool(finite)


def padded_count(count: int) -> int:
    """The length of `count` rows with their padding."""
    return (count // GALLERY_MULTIPLE + 1) * GALLERY_MULTIPLE


def find_copies(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of rows (N, D) that equal an earlier row, and for each the index of the first such row.

    Example:
        >>> again, first = find_copies(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0]]))
        >>> again.tolist(), first.tolist()
        ([2, 3], [0, 0])
    """
    count, dim = rows.shape
    hashes, order = row_hashes(rows).sort(stable=True)
    starts = torch.ones(count, dtype=torch.bool, device=rows.device)
    starts[1:] = hashes[1:] != hashes[:-1]
    first = order[torch.where(starts, torch.arange(count, device=rows.device), 0).cummax(0).values]
    again, first = order[~starts], first[~starts]
    # Different rows may share a hash.
    pairs = zip(again.split(_cached_rows(dim)), first.split(_cached_rows(dim)), strict=True)
    equal = torch.cat([(rows[a] == rows[b]).all(1) for a, b in pairs])
    return again[equal], first[equal]


def row_hashes(rows: Tensor, seed: int = 0) -> Tensor:
    """(N,) int64 hashes of float32 rows (N, D)."""
    dim = rows.shape[1]
    weights = torch.randint(-(2**62), 2**62, (dim,), generator=torch.Generator().manual_seed(seed)).to(rows.device) * 2 + 1
    return torch.cat([(part.view(torch.int32) * weights).sum(1) for part in rows.split(_cached_rows(dim))])


def _cached_rows(dim: int) -> int:
    return max(1, 2**18 // dim)  # rows that stay in a CPU's cache


def _find_copies_on_all_ranks(shard: Shard) -> tuple[Tensor, Tensor]:
    """`find_copies` for the whole set. Rows on different ranks are compared by 128 bits of hash."""
    if shard.ranks.world == 1:
        return find_copies(shard.rows[: shard.count])
    hashes = torch.stack([row_hashes(shard.rows[: shard.count], seed) for seed in (0, 1)], dim=1)
    group = torch.cat(shard.ranks.everyone(hashes, "copies")).unique(dim=0, return_inverse=True)[1]  # (N,)
    index = torch.arange(shard.total, device=group.device)
    first = torch.full_like(index, shard.total).scatter_reduce(0, group, index, "amin")[group]
    again = (first < index).nonzero()[:, 0]
    return again, first[again]


# ---------------------------------------------------------------- blocks


def padded_queries(queries: Tensor) -> Tensor:
    """Repeats the last index of a block of queries up to a multiple of `QUERY_MULTIPLE`."""
    return torch.cat([queries, queries[-1:].expand(-len(queries) % QUERY_MULTIPLE)])


def block_size(bytes_per_query: int) -> int:
    """The number of queries that fit into the work space together."""
    return max(QUERY_MULTIPLE, WORK_BYTES // bytes_per_query // QUERY_MULTIPLE * QUERY_MULTIPLE)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Computes float32 products in float32, regardless of the caller's TF32, bfloat16 and autocast settings."""
    with _ieee_products(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _ieee_products() -> Iterator[None]:
    settings = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if not all(hasattr(setting, "fp32_precision") for setting in settings):  # before torch 2.9: one setting for all devices
        whole = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(whole)
        return
    before = [setting.fp32_precision for setting in settings]  # type: ignore[union-attr]
    for setting in settings:
        setting.fp32_precision = "ieee"  # type: ignore[union-attr]
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision  # type: ignore[union-attr]


# ---------------------------------------------------------------- the caller's arguments


@dataclass(frozen=True, eq=False)
class Sets:
    """Queries and the gallery they search. Labels and ids are those of all rows, on every rank.

    Attributes:
        comparison: the embeddings; without a gallery, queries and gallery are the same shard.
        labels: (Q,) int64.
        gallery_labels: (G,) int64.
        ids: (Q,) int64 or None. A query is not compared with rows of its own id.
        gallery_ids: (G,) int64 or None.
    """

    comparison: Comparison
    labels: Tensor
    gallery_labels: Tensor
    ids: Tensor | None
    gallery_ids: Tensor | None


def read_sets(
    ranks: Ranks, embeddings: Any, labels: Any, gallery: Any = None, gallery_labels: Any = None, ids: Any = None,
    gallery_ids: Any = None,
) -> Sets:  # fmt: skip
    """Checks the arguments of `xbm.retrieval.evaluate`."""
    if (gallery is None) != (gallery_labels is None):
        raise InputError("a gallery needs embeddings and labels: pass both gallery and gallery_labels, or neither")
    if gallery is None and gallery_ids is not None:
        raise InputError("gallery_ids needs a gallery: to compare rows of different ids with each other, pass only ids")
    if gallery is not None and (ids is None) != (gallery_ids is None):
        raise InputError("pass both ids and gallery_ids, or neither")
    queries = read_shard(ranks, "embeddings", embeddings)
    searched = queries if gallery is None else read_shard(ranks, "gallery", gallery, queries)
    if gallery is None:
        ids = torch.arange(queries.total) if ids is None else ids
        gallery_labels, gallery_ids = labels, ids
    query_labels, other_labels = read_keys(("labels", "gallery_labels"), labels, gallery_labels, queries, searched)
    query_ids, other_ids = read_keys(("ids", "gallery_ids"), ids, gallery_ids, queries, searched)
    assert query_labels is not None and other_labels is not None
    return Sets(Comparison(queries, searched), query_labels, other_labels, query_ids, other_ids)


def read_shard(ranks: Ranks, name: str, values: Any, other: Shard | None = None) -> Shard:
    """Normalizes this rank's embeddings; with `other`, to its device and of its dimension. All ranks must call it.

    A rank may have no rows if another has some. What only one rank can see is refused on all of them.
    """
    rows = read_embeddings(ranks, name, values)
    rows = rows if other is None else rows.to(other.rows.device)
    unit, finite = unit_rows(rows)
    table = ranks.stack(torch.tensor([len(rows), rows.shape[1], finite]), "sizes").tolist()  # (R, 3)
    sizes, dims, all_finite = zip(*table, strict=True)
    if sum(sizes) == 0 or len(set(dims)) > 1:
        shapes = list(zip(sizes, dims, strict=True))
        raise InputError(f"{name} must have rows of one dimension on all ranks, got the shapes {shapes}")
    if other is not None and dims[0] != other.rows.shape[1]:
        raise InputError(f"queries are {other.rows.shape[1]}-d but the {name} is {dims[0]}-d: embed both with the same model")
    if not all(all_finite):
        raise InputError(f"{name} contains NaN or infinity: remove those rows, or find the step at which the model diverged")
    return Shard(padded(unit, padded_count(max(sizes))), sum(sizes[: ranks.rank]), len(rows), sum(sizes), ranks)


def read_embeddings(ranks: Ranks, name: str, values: Any) -> Tensor:
    """Returns float rows (N, D), not normalized. N may be 0 only if there are several ranks."""
    if not (isinstance(values, Sequence) or hasattr(values, "__array__")):
        raise InputError(f"{name} must be a float array of shape (N, D), got {type(values).__name__}")
    try:
        rows = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a float array of shape (N, D): {error}") from error
    if rows.ndim != 2 or rows.shape[1] == 0 or (len(rows) == 0 and ranks.world == 1):
        raise InputError(f"{name} must have shape (N, D) with N and D at least 1, got {tuple(rows.shape)}")
    if not rows.is_floating_point():
        raise InputError(f"{name} must be floats, got {rows.dtype}: convert with {name}.astype('float32')")
    return rows.detach()


def read_keys(
    names: tuple[str, str], keys: Any, gallery_keys: Any, queries: Shard, gallery: Shard
) -> tuple[Tensor | None, Tensor | None]:
    """Returns labels or ids of both sides as int64 under one numbering. Text is numbered in order of appearance."""
    if keys is None and gallery_keys is None:
        return None, None
    device, numbers = queries.rows.device, dict[str | bytes, int]()
    side, text = read_side(names[0], keys, queries.total, numbers)
    if gallery_keys is keys:
        return side.to(device), side.to(device)
    other, other_text = read_side(names[1], gallery_keys, gallery.total, numbers)
    if text != other_text:
        raise InputError(f"{names[0]} and {names[1]} must both be integers or both be text")
    return side.to(device), other.to(device)


def read_side(name: str, values: Any, total: int, numbers: dict[str | bytes, int]) -> tuple[Tensor, bool]:
    """Returns one int64 key per row, and whether the keys were text; `numbers` maps text seen so far to keys."""
    text = False
    if isinstance(values, Tensor) or getattr(getattr(values, "dtype", None), "kind", "") in tuple("biufc"):
        keys = torch.as_tensor(values)
    else:
        entries: list[Any] = [None]  # refused below
        if isinstance(values, Iterable):
            entries = values.tolist() if hasattr(values, "tolist") else list(values)
        text = all(isinstance(entry, str | bytes) for entry in entries)
        if not text and not all(hasattr(entry, "__index__") for entry in entries):
            raise InputError(f"{name} must be integers or text, one per row")
        keys = torch.tensor([numbers.setdefault(entry, len(numbers)) for entry in entries] if text else entries).long()
    if keys.is_floating_point() or keys.is_complex():
        raise InputError(f"{name} must be integers or text, got {keys.dtype}")
    if keys.ndim != 1:
        raise InputError(f"{name} must have shape (N,), got {tuple(keys.shape)}")
    if len(keys) != total:
        raise InputError(f"{len(keys)} {name} for {total} rows: pass one per row")
    return keys.long(), text


def at_least_one(name: str, value: Any) -> int:
    """Returns a whole number of at least 1."""
    number = plain_integer(value)
    if number is None or number < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number
