"""Recall@K, MAP@R, R-precision and mAP of embeddings, with or without a gallery of their own."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.inputs import read_ks, read_sets
from xbm.retrieval.ranks import Ranking, rank, ranks_of
from xbm.retrieval.spread import read_spread
from xbm.retrieval.spread_ranks import spread_ranks


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
    """Scores embeddings by what each row retrieves: exact, blockwise, on the device the embeddings are on.

    Without a gallery each row is compared with all others: with all but itself, or with all rows of another id when `ids` are
    given. With a gallery each row is compared with the gallery, less the rows of its own id when both ids are given. A
    gallery row is relevant when it has the query's label.

    Similarity is the cosine: rows are scaled to unit length here and multiplied in float32. Equal similarities are settled by
    index: the lower gallery row comes first; rows that are equal bit for bit are always tied. Beside a float32 copy of the
    embeddings the work space is 256 MiB at most, up to a gallery of five million rows (700,000 where classes have more than
    128 items); beyond that it is what 8 queries need.

    Args:
        embeddings: (N, D) tensor or array of any float type.
        labels: (N,) integers or text.
        gallery: (G, D); `gallery_labels`: (G,).
        ids: (N,) integers or text that name the instance (image) a row came from; `gallery_ids`: (G,).
        ks: the K of Recall@K. A K beyond the gallery counts as the size of the gallery.
        ranks: processes over which the embeddings are spread. Each gives its own rows, consecutive ones in the order of the
            ranks, and the labels and ids of all rows; the scores are those of one process, the same on each.

    Returns:
        Fractions `recall@K` for each K (a relevant row is among the first K), `map@r`, `r_precision`, `map` (average precision
        over the full ranking); `queries`, how many rows these are means over; `without_relevant`, how many rows have no
        relevant item and are in none of the means.

    Raises:
        InputError: shapes, types or values do not fit, or no query has a relevant item.

    Example:
        >>> import torch
        >>> scores = evaluate(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.6]]), [7, 7, 8, 8], ks=(1, 2))
        >>> scores["recall@1"], scores["recall@2"], scores["map@r"]
        (0.75, 0.75, 0.75)
    """
    ks = read_ks(ks)
    ranking = _rank(ranks, embeddings, labels, gallery, gallery_labels, ids, gallery_ids)
    counts = ranking.relevant > 0
    first = ranking.first[counts]
    scores = {f"recall@{k}": (first <= k).double().mean().item() for k in ks}
    scores["map@r"] = ranking.average_precision_at_r[counts].mean().item()
    scores["r_precision"] = ranking.r_precision[counts].mean().item()
    scores["map"] = ranking.average_precision[counts].mean().item()
    return scores | {"queries": len(first), "without_relevant": len(counts) - len(first)}


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
    """The curve of Recall@K for K = 1 … `up_to`, as `evaluate` would give it: (up_to,) float64 on the CPU.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.6]])
        >>> cumulative(x, [7, 7, 8, 8], up_to=3).tolist()
        [0.75, 0.75, 1.0]
    """
    read_ks([up_to])
    ranking = _rank(ranks, embeddings, labels, gallery, gallery_labels, ids, gallery_ids)
    first = ranking.first[ranking.relevant > 0]
    found = torch.bincount(first.clamp(max=up_to + 1), minlength=up_to + 2)[1 : up_to + 1]
    return found.cumsum(0).double() / len(first)


def _rank(ranks: Ranks | None, *arrays: Any) -> Ranking:
    if ranks is None or ranks.world == 1:
        ranking = rank(read_sets(*arrays), ranks_of)
    else:
        ranking = rank(read_spread(ranks, *arrays), spread_ranks)
    without = int((ranking.relevant == 0).sum())
    if without == len(ranking.relevant):
        raise InputError("no query has a relevant item: every label occurs only once, or queries and gallery share no label")
    if without and (ranks is None or ranks.first):
        warnings.warn(
            f"{without} of {len(ranking.relevant)} queries have no relevant item and are left out of every mean",
            stacklevel=3,
        )
    return ranking
