"""Which rows each anchor is compared with: labels make positives and negatives, ids and slots identify the anchor itself."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xbm.checks import all_named, check_device, check_embeddings, check_integers, same_rows, sound_rows
from xbm.errors import InputError, unknown

EXCLUDES = ("instance", "copy")


class Pairing(NamedTuple):
    """m anchors and the M rows they are compared with."""

    rows: Tensor  # (M, D)
    row_labels: Tensor  # (M,)
    stamps: Tensor  # (M,), negative: the row does not count
    labels: Tensor  # (m,)
    sound: Tensor | None  # (m,), False: the anchor must contribute nothing; None: the engine checks the anchors itself
    ids: Tensor | None = None  # (m,)
    row_ids: Tensor | None = None  # (M,), given if rows with the anchor's id are excluded
    own: Tensor | None = None  # (m,), the slot to exclude, -1 if there is none
    latest: tuple[Tensor, Tensor] | None = None  # pointer and size of the latest enqueue, for an engine that finds `own` itself
    in_batch: bool = False  # whether the rows are the anchors themselves

    def masks(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """(T, m) twice: the positive and the negative pairs among the rows from start to stop."""
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

    def of_anchors(self, cut: slice) -> "Pairing":
        """The pairing of some of the anchors."""
        labels, sound, ids, own = (x if x is None else x[cut] for x in (self.labels, self.sound, self.ids, self.own))
        assert labels is not None
        return self._replace(labels=labels, sound=sound, ids=ids, own=own)


class Memory(Protocol):
    """What a comparison needs to know about a memory."""

    dim: int
    update: str
    rows: Tensor
    row_labels: Tensor
    row_ids: Tensor
    stamps: Tensor
    pointer: Tensor
    latest: Tensor

    def latest_copies(self, ids: Tensor) -> Tensor: ...
    def latest_slots(self, m: int) -> Tensor: ...


def pair(
    anchors: Tensor, labels: Tensor, memory: Memory | None, ids: Tensor | None, exclude: str | None, inspect: bool = True
) -> Pairing:
    """Pairs the anchors (m, D) with the rows of a memory or, without one, with each other.

    Args:
        inspect: whether the values of the anchors are checked here. False for an engine whose kernels check them on the way,
            so that nothing is launched here.

    Raises:
        InputError: if an argument is invalid.
    """
    check_embeddings(anchors, "anchors", None if memory is None else memory.dim)
    labels = check_integers(labels, "labels", anchors)
    if ids is not None:
        ids = check_integers(ids, "ids", anchors)
    if memory is not None:
        check_device(anchors, "the anchors", memory.rows, "the memory")
        if ids is None and memory.update != "queue":
            raise InputError(f"update={memory.update!r} keeps one slot per instance: pass ids to the loss")
    if exclude is not None and exclude not in EXCLUDES:
        raise unknown("exclude", exclude, EXCLUDES)
    if exclude == "instance" and ids is None:
        raise InputError('exclude="instance" excludes rows by their instance id: pass ids')
    by_id = exclude == "instance" or (exclude is None and ids is not None)

    sound = None
    if inspect:
        sound = torch.ones_like(labels, dtype=torch.bool)
        if len(labels):
            sound = sound_rows(anchors.detach(), sound, ids, 0)
    if memory is None:
        stamps = labels.new_empty(0) if sound is None else sound.long() - 1
        own = torch.arange(len(labels), device=labels.device) if inspect and not by_id else None
        return Pairing(anchors, labels, stamps, labels, sound, ids, ids if by_id else None, own, in_batch=True)
    own, latest = None, None
    if ids is not None:
        own = None if by_id else memory.latest_copies(ids)
        if sound is not None and ids.device.type == "cpu":
            sound = all_named(memory.row_ids, memory.stamps, sound)
    elif sound is None:
        latest = (memory.pointer, memory.latest)
    else:
        own = memory.latest_slots(len(labels))
        sound = sound & same_rows(anchors.detach(), labels, memory.rows.detach(), memory.row_labels, own, memory.latest)
    row_ids = memory.row_ids if by_id else None
    return Pairing(memory.rows, memory.row_labels, memory.stamps, labels, sound, ids, row_ids, own, latest)


# ------------------------------------------------------------------ the few pairs that are not negatives, on a CPU


class Related(NamedTuple):
    """Pairs that share a label, an id or a slot, ordered by row."""

    row: Tensor  # (n,)
    anchor: Tensor  # (n,)
    positive: Tensor  # (n,), False: the anchor itself


def list_related(p: Pairing, most: float | None = None, block: int = 65536, step: int = 4096) -> Related | None:
    """Lists the pairs that are not negatives, without an (m, M) mask; None if more than `most` pairs share a label."""
    if most is not None and count_same_label(p, block) > most:
        return None
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


def count_same_label(p: Pairing, block: int = 65536) -> int:
    """How many pairs share a label."""
    classes, inverse = p.labels.unique(return_inverse=True)
    sizes = torch.zeros_like(classes)
    for labels in p.row_labels.split(block):
        sizes += torch.bincount(_lookup(classes, labels)[1], minlength=len(classes))
    return int(sizes[inverse].sum())


def _lookup(distinct: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The positions at which `values` holds one of the sorted `distinct` values, and which one."""
    which = torch.searchsorted(distinct, values).clamp(max=len(distinct) - 1)
    here = (distinct[which] == values).nonzero()[:, 0]
    return here, which[here]
