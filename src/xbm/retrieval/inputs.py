"""Checks the caller's arguments and converts them to one form: unit rows and int64 keys on one device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.distributed.ranks import padded
from xbm.errors import InputError
from xbm.retrieval.similarity import Comparison, Shard, padded_count, unit_rows


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
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)
