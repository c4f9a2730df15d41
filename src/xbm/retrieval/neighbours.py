"""The k nearest gallery rows of each query, exact, for reports and search."""

from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval.inputs import at_least_one, read_keys, read_shard
from xbm.retrieval.similarity import Comparison, SameKey, block_size, full_precision, padded

LOW = 2**32 - 1  # the lower half of a sort key


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
            indices = padded(block)
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
