"""Recall@K, MAP@R, R-precision and mAP of embeddings, against each other or against a gallery.

Under the protocol of a benchmark too: leave-one-out, a gallery, or one image per class.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.ranking import Ranking, rank
from xbm.retrieval.similarity import at_least_one, read_embeddings, read_sets, read_side


def evaluate(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    ids: Any = None,
    gallery_ids: Any = None,
    ks: Sequence[int] = (1, 10, 100, 1000),
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Scores embeddings by what each row retrieves: exact, in blocks, on the device of the embeddings.

    Without a gallery each row is compared with all other rows, or with all rows of a different id if `ids` are given. With a
    gallery each row is compared with the gallery, except for rows with its own id if both ids are given. A gallery row is
    relevant if it has the query's label.

    Similarity is the cosine: rows are normalized here and multiplied in float32. Of equal similarities the lower gallery index
    comes first; rows that are equal bit for bit are always tied. Besides a float32 copy of the embeddings, the work space is at
    most 256 MiB for galleries of up to five million rows (700,000 if classes have more than 128 items); beyond that it is what
    8 queries need.

    Args:
        embeddings: (N, D) tensor or array of any float type.
        labels: (N,) integers or text.
        gallery: (G, D) tensor or array of any float type.
        gallery_labels: (G,) integers or text.
        ids: (N,) integers or text that identify the instance (image) a row came from.
        gallery_ids: (G,) integers or text.
        ks: the K of Recall@K. A K larger than the gallery counts as the size of the gallery.
        ranks: processes over which the embeddings are distributed. Each rank passes its own consecutive rows, in rank order,
            and the labels and ids of all rows. Every rank gets the scores that a single process would compute.

    Returns:
        Fractions `recall@K` for each K (a relevant row is among the first K), `map@r`, `r_precision`, `map` (average precision
        over the full ranking); `queries`, the number of rows these are averaged over; `without_relevant`, the number of rows
        that have no relevant item and are excluded from every average.

    Raises:
        InputError: an argument has a wrong shape, type or value, or no query has a relevant item.

    Example:
        >>> import torch
        >>> scores = evaluate(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.6]]), [7, 7, 8, 8], ks=(1, 2))
        >>> scores["recall@1"], scores["recall@2"], scores["map@r"]
        (0.75, 0.75, 0.75)
    """
    ks = [at_least_one("K of Recall@K", k) for k in ks]
    ranking = _rank(ranks, embeddings, labels, gallery, gallery_labels, ids, gallery_ids)
    valid = ranking.relevant > 0
    first = ranking.first[valid]
    scores = {f"recall@{k}": (first <= k).double().mean().item() for k in ks}
    scores["map@r"] = ranking.average_precision_at_r[valid].mean().item()
    scores["r_precision"] = ranking.r_precision[valid].mean().item()
    scores["map"] = ranking.average_precision[valid].mean().item()
    return scores | {"queries": len(first), "without_relevant": len(valid) - len(first)}


def cumulative(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    ids: Any = None,
    gallery_ids: Any = None,
    *,
    up_to: int,
    ranks: Ranks | None = None,
) -> Tensor:
    """Returns Recall@K for K = 1 … `up_to`, as `evaluate` computes it: (up_to,) float64 on the CPU.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.6]])
        >>> cumulative(x, [7, 7, 8, 8], up_to=3).tolist()
        [0.75, 0.75, 1.0]
    """
    up_to = at_least_one("up_to", up_to)
    ranking = _rank(ranks, embeddings, labels, gallery, gallery_labels, ids, gallery_ids)
    first = ranking.first[ranking.relevant > 0]
    hits = torch.bincount(first.clamp(max=up_to + 1), minlength=up_to + 2)[1 : up_to + 1]
    return hits.cumsum(0).double() / len(first)


def _rank(ranks: Ranks | None, *arrays: Any) -> Ranking:
    ranks = Ranks.alone() if ranks is None else ranks
    ranking = rank(read_sets(ranks, *arrays))
    without = int((ranking.relevant == 0).sum())
    if without == len(ranking.relevant):
        raise InputError("no query has a relevant item: each label occurs only once, or queries and gallery share no label")
    if without and ranks.first:
        warnings.warn(
            f"{without} of {len(ranking.relevant)} queries have no relevant item and are excluded from every average",
            stacklevel=3,
        )
    return ranking


# ---------------------------------------------------------------- the protocols of benchmarks


class Labelled(Protocol):
    """A set of images, or other items, with one label each.

    It may also have `groups`, (N,) whole numbers such as cameras: see `own_group_ids`.
    """

    @property
    def labels(self) -> Any: ...
    def __len__(self) -> int: ...


class RetrievalProtocol(Protocol):
    """The queries and gallery of a benchmark, and the K it reports."""

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
        repeats: number of galleries to draw.
        seed: random seed; the same seed draws the same galleries on every device.
        ranks: as in `evaluate`.

    Returns:
        The means over the repeats under the names of `evaluate`, and the standard deviation between repeats (n - 1 in the
        denominator) of each under the same name with `_std`; `queries` is that of one repeat.

    Example:
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> scores = evaluate_one_per_class(v, [0, 0, 1, 1], ks=(1,), repeats=4)
        >>> scores["recall@1"], scores["queries"]
        (1.0, 2)
    """
    repeats = at_least_one("repeats", repeats)
    rows, start, total = _read(ranks, "embeddings", embeddings)
    keys, _ = read_side("labels", labels, total, {})
    keys = keys.cpu()
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(repeats):
        chosen = _one_per_class(keys, generator)
        if chosen.all():
            raise InputError("every class has only one image: no queries remain")
        searched = chosen[start : start + len(rows)].to(rows.device)
        runs.append(evaluate(rows[~searched], keys[~chosen], rows[searched], keys[chosen], ks=ks, ranks=ranks))
    table = {name: torch.tensor([run[name] for run in runs], dtype=torch.float64) for name in runs[0]}
    counts = {name: runs[0][name] for name in ("queries", "without_relevant")}
    means = {name: column.mean().item() for name, column in table.items() if name not in counts}
    deviations = {f"{name}_std": table[name].std().item() if repeats > 1 else 0.0 for name in means}
    return means | deviations | counts


def own_group_ids(protocol: RetrievalProtocol) -> tuple[Tensor | None, Tensor | None]:
    """The ids of queries and gallery with which `evaluate` leaves out what re-identification calls junk: the gallery images
    of a query's label and group, such as those of its own camera. None if the sets of the protocol have no `groups`.

    Without a gallery the second is None, and a query is also left out of its own gallery, as one of its label and group.

        >>> from types import SimpleNamespace
        >>> import torch
        >>> queries = SimpleNamespace(labels=torch.tensor([7, 8]), groups=torch.tensor([0, 0]))
        >>> gallery = SimpleNamespace(labels=torch.tensor([7, 7, 8]), groups=torch.tensor([0, 1, 0]))
        >>> ids, gallery_ids = own_group_ids(SimpleNamespace(query=queries, gallery=gallery))
        >>> (ids[:, None] == gallery_ids).tolist()  # what is left out: the row of one's own label and camera
        [[True, False, False], [False, False, True]]
    """
    sets = (protocol.query,) if protocol.gallery is None else (protocol.query, protocol.gallery)
    groups = [getattr(images, "groups", None) for images in sets]
    if any(each is None for each in groups):
        return None, None
    pairs = [torch.stack([torch.as_tensor(s.labels), torch.as_tensor(g)], 1) for s, g in zip(sets, groups, strict=True)]
    numbers = torch.cat(pairs).unique(dim=0, return_inverse=True)[1].split([len(pair) for pair in pairs])
    return numbers[0], None if protocol.gallery is None else numbers[1]


def score(
    protocol: RetrievalProtocol, query_embeddings: Any, gallery_embeddings: Any = None, ranks: Ranks | None = None
) -> dict[str, float]:
    """Applies a benchmark's protocol to the embeddings of its images, in the order of its sets.

    A protocol without a gallery compares each query with all others (leave-one-out). One that also asks for one image per
    class gets both: `recall@1` is leave-one-out, `one_per_class/recall@1` and `one_per_class/recall@1_std` the other.
    If the sets have `groups`, a query's gallery is without the images of its label and group: `recall@K` is then the CMC
    at rank K of re-identification, and `map` its mAP.
    With `ranks` each rank passes the embeddings of its own consecutive images, in rank order.

    Example:
        >>> from types import SimpleNamespace
        >>> class Images(list):
        ...     labels = property(lambda self: [int(name[0]) for name in self])
        >>> images = Images(["0a", "0b", "1a", "1b"])
        >>> protocol = SimpleNamespace(name="pictures", query=images, gallery=None, ks=(1,), one_per_class=0)
        >>> v = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> score(protocol, v)["recall@1"]
        0.5
    """
    queries = _read_all(ranks, protocol.name, "query", query_embeddings, protocol.query)
    labels = torch.as_tensor(protocol.query.labels)
    gallery = gallery_labels = None
    if protocol.gallery is None and gallery_embeddings is not None:
        raise InputError(f"{protocol.name} has no gallery: pass only the embeddings of its queries")
    if protocol.gallery is not None:
        if gallery_embeddings is None:
            raise InputError(f"{protocol.name} has a gallery of {len(protocol.gallery)} images: pass their embeddings too")
        gallery = _read_all(ranks, protocol.name, "gallery", gallery_embeddings, protocol.gallery)
        gallery_labels = torch.as_tensor(protocol.gallery.labels)
    ids, gallery_ids = own_group_ids(protocol)
    scores = evaluate(queries, labels, gallery, gallery_labels, ids, gallery_ids, ks=protocol.ks, ranks=ranks)
    if protocol.one_per_class:
        other = evaluate_one_per_class(queries, labels, ks=protocol.ks, repeats=protocol.one_per_class, ranks=ranks)
        scores |= {f"one_per_class/{name}": value for name, value in other.items()}
    return scores


def _read(ranks: Ranks | None, name: str, values: Any) -> tuple[Tensor, int, int]:
    """Returns this rank's rows, the index of the first one in the whole set, and the size of that set."""
    ranks = Ranks.alone() if ranks is None else ranks
    rows = read_embeddings(ranks, name, values)
    sizes = ranks.stack(torch.tensor([len(rows)]), "sizes").flatten().tolist()
    return rows, sum(sizes[: ranks.rank]), sum(sizes)


def _read_all(ranks: Ranks | None, benchmark: str, role: str, values: Any, images: Labelled) -> Tensor:
    """Returns this rank's rows, which with those of all ranks must be one per image."""
    rows, _, total = _read(ranks, f"{role} embeddings", values)
    if total != len(images):
        raise InputError(f"{benchmark} has {len(images)} {role} images, got {total} embeddings: embed each image once")
    return rows


def _one_per_class(labels: Tensor, generator: torch.Generator) -> Tensor:
    """(N,): True for one row of each class, drawn uniformly."""
    shuffled = torch.randperm(len(labels), generator=generator)
    ordered, order = labels[shuffled].sort(stable=True)
    starts = torch.ones(len(labels), dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[shuffled[order[starts]]] = True
    return chosen
