"""The k gallery rows nearest to each query, exact, for reports and search."""

from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.copies import find_copies
from xbm.retrieval.inputs import read_embeddings, read_keys, read_unit_rows, same_dim, same_length
from xbm.retrieval.order import LOW, ordered_keys
from xbm.retrieval.same_key import SameKey
from xbm.retrieval.similarity import block_size, full_precision, padded
from xbm.retrieval.spread_neighbours import spread_nearest


def nearest(
    query: Any, gallery: Any, k: int, query_ids: Any = None, gallery_ids: Any = None, ranks: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """The k most similar gallery rows of each query, best first; of equal ones the lower index comes first.

    Similarity is the cosine, as in `evaluate`. With both ids given, rows of the query's own id are left out; places that are
    then left over hold index -1 and similarity -inf. The work space is bounded as in `evaluate`.

    Args:
        query: (Q, D); `gallery`: (G, D), tensors or arrays of any float type.
        k: how many; at most the whole gallery is returned.
        query_ids: (Q,) integers or text; `gallery_ids`: (G,).
        ranks: as in `evaluate`: each gives its own rows and all ids, and all get the neighbours of all queries.

    Returns:
        Similarities (Q, min(k, G)) float32 and indices into the gallery, int64, on the device of `query`.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 2.0]])
        >>> nearest(x, x, k=2, query_ids=range(4), gallery_ids=range(4))[1].tolist()
        [[2, 1], [3, 2], [1, 3], [1, 2]]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k is {k!r}: ask for a whole number of neighbours from 1")
    if (query_ids is None) != (gallery_ids is None):
        raise InputError("ids of queries and gallery go together: give query_ids and gallery_ids, or neither")
    if ranks is not None and ranks.world > 1:
        return spread_nearest(ranks, query, gallery, k, query_ids, gallery_ids)
    rows = read_embeddings("query", query)
    searched = read_embeddings("gallery", gallery).to(rows.device)
    same_dim(rows, searched)
    ids, other_ids = read_keys("ids", query_ids, gallery_ids, rows.device)
    same_length("query_ids", ids, "query", rows)
    same_length("gallery_ids", other_ids, "gallery", searched)
    unit = read_unit_rows("query", rows)
    unit_gallery = unit if gallery is query else read_unit_rows("gallery", searched)
    excluded = None if ids is None or other_ids is None else SameKey(ids, other_ids)
    return _nearest(unit, unit_gallery, len(rows), len(searched), min(k, len(searched)), excluded)


def _nearest(
    queries: Tensor, gallery: Tensor, count: int, size: int, k: int, excluded: SameKey | None
) -> tuple[Tensor, Tensor]:
    device = queries.device
    width = int(excluded.count.max()) if excluded else 0
    similarities = torch.empty(count, k, device=device)
    indices = torch.empty(count, k, dtype=torch.int64, device=device)
    low = LOW - torch.arange(len(gallery), device=device)
    again, first = find_copies(gallery[:size])
    step = block_size(40 * len(gallery) + 32 * k + 32 * width + 12 * len(again))
    with full_precision(device):
        for start in range(0, count, step):
            block = torch.arange(start, min(start + step, count), device=device)
            chosen = padded(block)
            S = queries[chosen] @ gallery.t()  # (b, G)
            S[:, size:] = -torch.inf
            S[:, again] = S[:, first]
            if excluded:
                S.scatter_(1, excluded.rows(chosen, width), -torch.inf)
            place = LOW - (ordered_keys(S, low).topk(k, dim=1).values[: len(block)] & LOW)
            similarity = S[: len(block)].gather(1, place)
            similarities[block] = similarity
            indices[block] = place.masked_fill_(similarity == -torch.inf, -1)
    return similarities, indices
