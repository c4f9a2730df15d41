"""Who is compared with whom: labels make positives and negatives, ids and slots say which row is the anchor itself."""

from typing import NamedTuple

import torch
from torch import Tensor


class Pairing(NamedTuple):
    """m anchors and M rows. A row counts if it was ever written; it is the anchor itself by id, or by slot."""

    rows: Tensor  # (M, D)
    row_labels: Tensor  # (M,)
    stamps: Tensor  # (M,), below 0 = the row does not count
    labels: Tensor  # (m,)
    sound: Tensor | None  # (m,), False = an anchor that must add nothing; None = the engine looks for itself
    ids: Tensor | None = None  # (m,)
    row_ids: Tensor | None = None  # (M,)
    own: Tensor | None = None  # (m,), the slot of the anchor's own copy, -1 if it has none
    latest: tuple[Tensor, Tensor] | None = None  # the queue's pointer and newest rows: own slots for the engine to find

    def masks(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """(T, m) twice: positive and negative pairs among the rows from start to stop."""
        assert self.sound is not None
        cut = slice(start, stop)
        counts = (self.stamps[cut] >= 0)[:, None] & self.sound
        if self.ids is not None and self.row_ids is not None:
            counts &= self.row_ids[cut, None] != self.ids
        if self.own is not None:
            slots = torch.arange(len(self.stamps), device=self.own.device)[cut]
            counts &= slots[:, None] != self.own
        same = self.row_labels[cut, None] == self.labels
        return same & counts, ~same & counts

    def unsound(self) -> Tensor:
        assert self.sound is not None
        return (~self.sound).sum()


class Related(NamedTuple):
    """The few pairs that are not negatives, as lists; ordered by row. For the CPU, where looking is free."""

    row: Tensor  # (n,)
    anchor: Tensor  # (n,)
    positive: Tensor  # (n,), False = the anchor itself


def count_related(p: Pairing, block: int = 65536) -> int:
    """How many pairs share a label."""
    classes, inverse = p.labels.unique(return_inverse=True)
    sizes = torch.zeros_like(classes)
    for start in range(0, len(p.stamps), block):
        _, found = _lookup(classes, p.row_labels[start : start + block])
        sizes += torch.bincount(found, minlength=len(classes))
    return int(sizes[inverse].sum())


def list_related(p: Pairing, block: int = 65536, step: int = 4096) -> Related:
    """The pairs that share a label, an id or a slot, found without an (m, M) mask."""
    parts = []
    for start in range(0, len(p.stamps), block):
        stop = min(start + block, len(p.stamps))
        candidate = torch.zeros(stop - start, dtype=torch.bool, device=p.stamps.device)
        candidate[_lookup(p.labels.unique(), p.row_labels[start:stop])[0]] = True
        if p.ids is not None and p.row_ids is not None:
            candidate[_lookup(p.ids.unique(), p.row_ids[start:stop])[0]] = True
        if p.own is not None:
            candidate[p.own[(p.own >= start) & (p.own < stop)] - start] = True
        rows = (candidate & (p.stamps[start:stop] >= 0)).nonzero()[:, 0] + start
        for some in rows.split(step):
            picked = p._replace(
                row_labels=p.row_labels[some],
                stamps=p.stamps[some],
                row_ids=None if p.row_ids is None else p.row_ids[some],
                own=None,
            )
            positive, negative = picked.masks()
            if p.own is not None:
                self_pair = some[:, None] == p.own
                positive, negative = positive & ~self_pair, negative & ~self_pair
            r, a = (~negative).nonzero(as_tuple=True)
            parts.append(Related(some[r], a, positive[r, a]))
    if not parts:
        none = p.labels[:0]
        return Related(none, none, none.bool())
    return Related(*(torch.cat(column) for column in zip(*parts)))


def _lookup(distinct: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Where `values` holds one of the sorted `distinct`, and which."""
    which = torch.searchsorted(distinct, values).clamp(max=len(distinct) - 1)
    here = (distinct[which] == values).nonzero()[:, 0]
    return here, which[here]
