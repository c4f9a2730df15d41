"""Recall@K, MAP@R, R-precision and mAP of embeddings, against each other or against a gallery."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.exact_ranks import Ranking, rank
from xbm.retrieval.inputs import at_least_one, read_sets


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
