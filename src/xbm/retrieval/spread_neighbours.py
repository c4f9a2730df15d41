"""The nearest rows of a gallery that is spread over the ranks: each finds its own, and the best of all are kept."""

from typing import Any

import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.retrieval.inputs import read_keys
from xbm.retrieval.order import LOW, ordered_keys, similarity_of
from xbm.retrieval.same_key import SameKey
from xbm.retrieval.similarity import block_size, full_precision, padded
from xbm.retrieval.spread import meeting_of, read_parts, same_total


def spread_nearest(ranks: Ranks, query: Any, gallery: Any, k: int, query_ids: Any, gallery_ids: Any) -> tuple[Tensor, Tensor]:
    """As `xbm.retrieval.nearest`, for all queries on every rank: similarities (Q, k) and numbers of rows in all parts."""
    queries, part = read_parts(ranks, query, gallery)
    device = queries.rows.device
    ids, other_ids = read_keys("ids", query_ids, gallery_ids, device)
    same_total(ids, queries)
    same_total(other_ids, part)
    excluded = None if ids is None or other_ids is None else SameKey(ids, other_ids)
    width = int(excluded.count.max()) if excluded else 0
    meeting, k = meeting_of(queries, part), min(k, part.total)
    found = torch.empty(queries.total, k, dtype=torch.int64, device=device)
    low = LOW - (part.start + torch.arange(len(part.rows), device=device)).clamp(max=part.total)
    step = block_size(40 * len(part.rows) + 32 * k * (ranks.world + 1) + 32 * width + 12 * meeting.copied)
    with full_precision(device):
        for start in range(0, queries.total, step):
            block = torch.arange(start, min(start + step, queries.total), device=device)
            chosen = padded(block)
            S = meeting.similarities(chosen, excluded.rows(chosen, width) if excluded else None)
            keys = ordered_keys(S, low).topk(min(k, S.shape[1]), dim=1).values[: len(block)]
            everyone = ranks.stack(keys, "neighbours").transpose(0, 1).flatten(1)  # (b, R · k)
            found[block] = everyone.topk(k, dim=1).values
    similarity = similarity_of(found)
    return similarity, (LOW - (found & LOW)).masked_fill_(similarity == -torch.inf, -1)
