"""Checks what a caller hands in and brings it into one form: unit rows and integer keys on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from xbm.errors import InputError
from xbm.retrieval.copies import find_copies
from xbm.retrieval.similarity import unit_rows


@dataclass(frozen=True, eq=False)
class Sets:
    """Queries and the gallery they search. Both are padded with rows of zeros; without a gallery they are the same tensor.

    Attributes:
        queries: (Q + padding, D) float32 unit rows.
        gallery: (G + padding, D) float32 unit rows.
        copies: gallery rows that repeat an earlier one, and which one: (C,) int64 each.
        labels: (Q,) int64; `gallery_labels`: (G,) int64.
        ids: (Q,) int64 or None; `gallery_ids`: (G,) int64 or None. A query is not compared with rows of its own id.
    """

    queries: Tensor
    gallery: Tensor
    copies: tuple[Tensor, Tensor]
    labels: Tensor
    gallery_labels: Tensor
    ids: Tensor | None
    gallery_ids: Tensor | None

    @property
    def copied(self) -> int:
        return len(self.copies[0])


def read_sets(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    ids: Any = None,
    gallery_ids: Any = None,
) -> Sets:
    """The arguments of `xbm.retrieval.evaluate`, checked."""
    if (gallery is None) != (gallery_labels is None):
        raise InputError("a gallery needs both its embeddings and its labels: give gallery and gallery_labels, or neither")
    if gallery is None and gallery_ids is not None:
        raise InputError("gallery_ids without a gallery: give ids alone to compare each row with the rows of other ids")
    if gallery is not None and (ids is None) != (gallery_ids is None):
        raise InputError("ids of queries and gallery go together: give ids and gallery_ids, or neither")
    rows = read_embeddings("embeddings", embeddings)
    query_labels, other_labels = read_keys("labels", labels, gallery_labels, rows.device)
    query_ids, other_ids = read_keys("ids", ids, gallery_ids, rows.device)
    same_length("labels", query_labels, "embeddings", rows)
    same_length("ids", query_ids, "embeddings", rows)
    queries = read_unit_rows("embeddings", rows)
    assert query_labels is not None
    if gallery is None:
        if query_ids is None:
            query_ids = torch.arange(len(rows), device=rows.device)
        copies = find_copies(queries[: len(rows)])
        return Sets(queries, queries, copies, query_labels, query_labels, query_ids, query_ids)
    searched = read_embeddings("gallery", gallery).to(rows.device)
    same_length("gallery_labels", other_labels, "gallery", searched)
    same_length("gallery_ids", other_ids, "gallery", searched)
    same_dim(queries, searched)
    assert other_labels is not None
    unit = read_unit_rows("gallery", searched)
    return Sets(queries, unit, find_copies(unit[: len(searched)]), query_labels, other_labels, query_ids, other_ids)


def read_embeddings(name: str, values: Any) -> Tensor:
    """(N, D) of some float type, N and D at least 1; not yet scaled."""
    try:
        rows = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} cannot be read as an array of numbers ({error}): give a float array (N, D)") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise InputError(f"{name} has shape {tuple(rows.shape)}: give a float array (N, D) with N and D at least 1")
    if not rows.is_floating_point():
        raise InputError(f"{name} holds {rows.dtype}: give floats, for example {name}.astype('float32')")
    return rows.detach()


def read_unit_rows(name: str, rows: Tensor) -> Tensor:
    unit, finite = unit_rows(rows)
    if not finite:
        raise InputError(f"{name} holds NaN or infinity: leave those rows out, or look for the step where the model diverged")
    return unit


def read_keys(name: str, query: Any, gallery: Any, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Labels or ids of both sides as int64 under one numbering; text is numbered in order of appearance."""
    numbers: dict[str | bytes, int] = {}
    keys, text = _read_side(name, query, numbers)
    gallery_keys, gallery_text = _read_side(f"gallery_{name}", gallery, numbers)
    if keys is not None and gallery_keys is not None and text != gallery_text:
        raise InputError(f"{name} and gallery_{name} must both be integers or both be text")
    return None if keys is None else keys.to(device), None if gallery_keys is None else gallery_keys.to(device)


def _read_side(name: str, values: Any, numbers: dict[str | bytes, int]) -> tuple[Tensor | None, bool]:
    """The keys as int64 and whether they were text."""
    if values is None:
        return None, False
    try:
        keys, text = torch.as_tensor(values), False
    except (TypeError, ValueError, RuntimeError):
        texts = values.tolist() if hasattr(values, "tolist") else list(values)
        if not isinstance(texts, list) or not all(isinstance(entry, str | bytes) for entry in texts):
            raise InputError(f"{name} must be integers or text, one a row") from None
        keys, text = torch.tensor([numbers.setdefault(entry, len(numbers)) for entry in texts]), True
    if keys.is_floating_point() or keys.is_complex():
        raise InputError(f"{name} holds {keys.dtype}: give integers or text, one a row")
    if keys.ndim != 1:
        raise InputError(f"{name} has shape {tuple(keys.shape)}: give one integer or text a row, shape (N,)")
    return keys.to(torch.int64), text


def same_length(name: str, keys: Tensor | None, rows_name: str, rows: Tensor) -> None:
    if keys is not None and len(keys) != len(rows):
        raise InputError(f"{len(keys)} {name} for {len(rows)} rows of {rows_name}: give one for each row")


def same_dim(queries: Tensor, gallery: Tensor) -> None:
    if queries.shape[1] != gallery.shape[1]:
        raise InputError(
            f"embeddings are {queries.shape[1]}-d and the gallery is {gallery.shape[1]}-d: embed both with one model"
        )


def read_ks(ks: Sequence[int]) -> tuple[int, ...]:
    """The K of Recall@K, each a whole number from 1."""
    for k in ks:
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise InputError(f"K of Recall@K is {k!r}: give whole numbers from 1, for example ks=(1, 10, 100)")
    return tuple(int(k) for k in ks)
