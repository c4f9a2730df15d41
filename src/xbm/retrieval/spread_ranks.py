"""The ranks of relevant items where the gallery is spread: every rank counts, among its own rows, what comes before each.

The similarity of an item is told by the rank that has it. Rows of earlier ranks stand before the item in the whole gallery and
are counted when equal, rows of later ones are not; counts are added up. Ranks are whole numbers, so that their order and
every score made of them are those of one process.
"""

import torch
from torch import Tensor

from xbm.retrieval import ranks as counting
from xbm.retrieval.ranks import NEVER, Work, count_before
from xbm.retrieval.spread import Part, SpreadSets


def spread_ranks(
    sets: SpreadSets, queries: Tensor, candidates: Tensor, left_out: Tensor | None, width: int, work: Work
) -> Tensor:
    """As `xbm.retrieval.ranks.ranks_of`; candidates and rows left out are numbers in the whole gallery."""
    part, few = sets.meeting.gallery, width <= counting.SORT_ABOVE
    out = work.similarities[: len(sets.gallery) * len(queries)].view(-1, len(queries)) if few else None
    S = sets.meeting.similarities(queries, left_out, out)
    told = part.ranks.maximum(S.gather(1, part.here(candidates)), "similarities of relevant items")
    threshold, kept = told.topk(width, dim=1)
    items = candidates.gather(1, kept)
    if few:
        # Items of earlier ranks stand for this with the first row, before which nothing is; those of later ones with the last,
        # which is padding.
        place = (items - part.start).clamp(0, len(part.rows) - 1)
        before = count_before(S.t(), place, threshold, work.greater)
    else:
        before = _sort_before(S, items, threshold, part)
    return (part.ranks.sum(before, "ranks of relevant items") + 1).masked_fill_(threshold == -torch.inf, NEVER)


def _sort_before(S: Tensor, items: Tensor, threshold: Tensor, part: Part) -> Tensor:
    """(b, R) how many rows of S, (b, G/R), come before each item."""
    values, order = S.sort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, torch.arange(S.shape[1], device=S.device).expand_as(order))
    rising = values.flip(1).contiguous()
    greater, no_less = (S.shape[1] - torch.searchsorted(rising, threshold, right=right) for right in (True, False))
    before = torch.where(items < part.start, greater, no_less)
    here = part.here(items)
    return torch.where(here < part.count, place.gather(1, here), before)
