"""How a benchmark is scored: its protocol applied to embeddings of its queries and its gallery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.inputs import read_embeddings, read_keys
from xbm.retrieval.metrics import evaluate


class Labelled(Protocol):
    """A set of images, or of anything else, with one label each."""

    @property
    def labels(self) -> Any: ...
    def __len__(self) -> int: ...


class RetrievalProtocol(Protocol):
    """How a benchmark is scored: who queries, what is searched, which K are reported."""

    @property
    def name(self) -> str: ...
    @property
    def query(self) -> Labelled: ...
    @property
    def ks(self) -> tuple[int, ...]: ...
    @property
    def gallery(self) -> Labelled | None: ...
    @property
    def one_per_class(self) -> int: ...


def evaluate_one_per_class(
    embeddings: Any, labels: Any, ks: Sequence[int] = (1, 5), repeats: int = 10, seed: int = 0, ranks: Ranks | None = None
) -> dict[str, float]:
    """Scores with one random image of each class as the gallery and all others as queries, as VehicleID does.

    Args:
        embeddings: (N, D) tensor or array of any float type.
        labels: (N,) integers or text.
        ks: the K of Recall@K.
        repeats: how many galleries are drawn; the same ones for the same seed, whatever the device.
        ranks: as in `evaluate`.

    Returns:
        The means over the repeats under the names of `evaluate`, and the standard deviation between repeats (n - 1 in the
        denominator) of each under the same name with `_std`; `queries` is that of one repeat.
    """
    if repeats < 1:
        raise InputError(f"repeats is {repeats}: draw the gallery at least once")
    rows, (start, total) = _read(ranks, "embeddings", embeddings)
    keys, _ = read_keys("labels", labels, None, torch.device("cpu"))
    assert keys is not None
    if len(keys) != total:
        raise InputError(f"{len(keys)} labels for {total} rows of embeddings: give one for each row")
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(repeats):
        chosen = _one_per_class(keys, generator)
        if chosen.all():
            raise InputError("every class has one image only: nothing is left to query with")
        searched = chosen[start : start + len(rows)].to(rows.device)
        runs.append(evaluate(rows[~searched], keys[~chosen], rows[searched], keys[chosen], ks=ks, ranks=ranks))
    table = {name: torch.tensor([run[name] for run in runs], dtype=torch.float64) for name in runs[0]}
    counts = {name: runs[0][name] for name in ("queries", "without_relevant")}
    means = {name: column.mean().item() for name, column in table.items() if name not in counts}
    spread = {f"{name}_std": table[name].std().item() if repeats > 1 else 0.0 for name in means}
    return means | spread | counts


def score(
    protocol: RetrievalProtocol, query_embeddings: Any, gallery_embeddings: Any = None, ranks: Ranks | None = None
) -> dict[str, float]:
    """Applies a benchmark's protocol to the embeddings of its images, in the order of its sets.

    A protocol without a gallery compares each query with all others (leave-one-out). One that also asks for one image per
    class gets both: `recall@1` is leave-one-out, `one_per_class/recall@1` and `one_per_class/recall@1_std` the other.
    With `ranks` each gives the embeddings of its own consecutive images, in the order of the ranks.
    """
    queries, (_, total) = _read(ranks, "query embeddings", query_embeddings)
    _expect(protocol.name, "query", total, len(protocol.query))
    labels = torch.as_tensor(protocol.query.labels)
    if protocol.gallery is None:
        if gallery_embeddings is not None:
            raise InputError(f"{protocol.name} has no gallery: give the embeddings of its queries alone")
        scores = evaluate(queries, labels, ks=protocol.ks, ranks=ranks)
    else:
        if gallery_embeddings is None:
            raise InputError(f"{protocol.name} has a gallery of {len(protocol.gallery)}: give its embeddings too")
        gallery, (_, total) = _read(ranks, "gallery embeddings", gallery_embeddings)
        _expect(protocol.name, "gallery", total, len(protocol.gallery))
        gallery_labels = torch.as_tensor(protocol.gallery.labels)
        scores = evaluate(queries, labels, gallery, gallery_labels, ks=protocol.ks, ranks=ranks)
    if protocol.one_per_class:
        other = evaluate_one_per_class(queries, labels, ks=protocol.ks, repeats=protocol.one_per_class, ranks=ranks)
        scores |= {f"one_per_class/{name}": value for name, value in other.items()}
    return scores


def _read(ranks: Ranks | None, name: str, values: Any) -> tuple[Tensor, tuple[int, int]]:
    """The rows, the number of the first one in the whole set, and how many that has."""
    if ranks is None or ranks.world == 1:
        rows = read_embeddings(name, values)
        return rows, (0, len(rows))
    rows = torch.as_tensor(values)  # a rank may have none
    sizes = ranks.stack(torch.tensor([len(rows)]), "sizes").flatten().tolist()
    return rows, (sum(sizes[: ranks.rank]), sum(sizes))


def _one_per_class(labels: Tensor, generator: torch.Generator) -> Tensor:
    """(N,) True for one row of each class, each row of a class equally likely."""
    shuffled = torch.randperm(len(labels), generator=generator)
    ordered, place = labels[shuffled].sort(stable=True)
    starts = torch.ones(len(labels), dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[shuffled[place[starts]]] = True
    return chosen


def _expect(name: str, role: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise InputError(f"{name} has {wanted} {role} images and {given} embeddings were given: embed each image once")
