"""Which rows each anchor is compared with: labels make positives and negatives, ids and slots identify the anchor itself."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xbm.checks import all_named, check_device, check_embeddings, check_integers, same_rows, sound_rows
from xbm.errors import InputError, unknown

EXCLUDES = ("none", "instance", "copy")


class References(NamedTuple):
    """Live rows on the other side, which may have a gradient."""

    rows: Tensor  # (r, D), unit rows
    labels: Tensor  # (r,)
    ids: Tensor | None  # (r,)


class Pairing(NamedTuple):
    """m anchors and the M rows they are compared with: `rows`, after `references` if there are any."""

    rows: Tensor  # (M − r, D)
    row_labels: Tensor  # (M,)
    stamps: Tensor  # (M,), negative: the row does not count
    labels: Tensor  # (m,)
    sound: Tensor | None  # (m,), False: the anchor must contribute nothing; None: the engine checks the anchors itself
    ids: Tensor | None = None  # (m,)
    row_ids: Tensor | None = None  # (M,), given if rows with the anchor's id are excluded
    own: Tensor | None = None  # (m,), the slot to exclude, -1 if there is none
    latest: tuple[Tensor, Tensor] | None = None  # pointer and size of the latest enqueue, for an engine that finds `own` itself
    in_batch: bool = False  # whether the rows are the anchors themselves
    references: Tensor | None = None  # (r, D), live rows beside a memory's; without a memory they are `rows`

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


class Tile(NamedTuple):
    """A few consecutive rows of a pairing."""

    start: int  # index of the first of them
    rows: Tensor  # (T, D)
    part: int  # -1: of the rows, -2: of the references
    cut: slice  # where they are in that part


def tiles_of(parts: Sequence[Tensor], height: int) -> list[Tile]:
    """The references, if there are any, and the rows in tiles of up to `height`, none of which spans both."""
    tiles, first = [], 0
    for part, rows in enumerate(parts, -len(parts)):
        cuts = [slice(start, min(start + height, len(rows))) for start in range(0, len(rows), height)]
        tiles += [Tile(first + cut.start, rows[cut], part, cut) for cut in cuts]
        first += len(rows)
    return tiles


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
    anchors: Tensor,
    labels: Tensor,
    memory: Memory | None,
    ids: Tensor | None,
    exclude: str | None,
    inspect: bool = True,
    references: References | None = None,
) -> Pairing:
    """Pairs the anchors (m, D) with the references and the rows of a memory or, without either, with each other.

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
    if exclude is None:
        exclude = "none" if references is not None else "copy" if ids is None else "instance"
    elif exclude not in EXCLUDES:
        raise unknown("exclude", exclude, EXCLUDES)
    if exclude == "instance" and ids is None:
        raise InputError('exclude="instance" excludes rows by their instance id: pass ids')
    named = ids is not None or (references is not None and references.ids is not None)
    if memory is not None and memory.update != "queue" and not named and (exclude != "none" or references is not None):
        raise InputError(f"update={memory.update!r} keeps one slot per instance: pass ids to the loss")

    sound = None
    if inspect:
        sound = torch.ones_like(labels, dtype=torch.bool)
        if len(labels):
            sound = sound_rows(anchors.detach(), sound, ids, 0)
    if references is not None:
        return _pair_with_references(labels, references, memory, ids, exclude, sound)
    own, latest = None, None
    if memory is None:
        stamps = labels.new_empty(0) if sound is None else sound.long() - 1
        if exclude == "none":
            own = torch.full_like(labels, -1)
        elif inspect and exclude == "copy":
            own = torch.arange(len(labels), device=labels.device)
        return Pairing(anchors, labels, stamps, labels, sound, ids, ids if exclude == "instance" else None, own, in_batch=True)
    if ids is not None:
        own = memory.latest_copies(ids) if exclude == "copy" else None
        if sound is not None and ids.device.type == "cpu":
            sound = all_named(memory.row_ids, memory.stamps, sound)
    elif exclude == "copy" and sound is None:
        latest = (memory.pointer, memory.latest)
    elif exclude == "copy":
        assert sound is not None
        own = memory.latest_slots(len(labels))
        sound = sound & same_rows(anchors.detach(), labels, memory.rows.detach(), memory.row_labels, own, memory.latest)
    row_ids = memory.row_ids if exclude == "instance" else None
    return Pairing(memory.rows, memory.row_labels, memory.stamps, labels, sound, ids, row_ids, own, latest)


# ------------------------------------------------------------------ live rows on the other side


def check_references(
    anchors: Tensor,
    labels: Tensor,
    ids: Tensor | None,
    references: Tensor | None,
    reference_labels: Tensor | None,
    reference_ids: Tensor | None,
) -> References | None:
    """The references with their labels and ids, which are the anchors' unless given.

    Raises:
        InputError: if an argument is invalid.
    """
    if references is None:
        if reference_labels is not None or reference_ids is not None:
            raise InputError("reference_labels and reference_ids belong to references: pass references too")
        return None
    if labels is None:
        raise InputError("pass labels: torch.arange(len(anchors)) if each anchor belongs to the reference of its own row alone")
    check_embeddings(references, "references")
    if references.shape[1] != anchors.shape[1]:
        raise InputError(f"the anchors have {anchors.shape[1]} columns, the references {references.shape[1]}")
    check_device(references, "the references", anchors, "the anchors")
    as_many = len(references) == len(anchors)
    if reference_labels is None and not as_many:
        raise InputError(f"{len(anchors)} anchors but {len(references)} references: pass reference_labels")
    if reference_ids is None and ids is not None and not as_many:
        raise InputError(f"{len(anchors)} anchors with ids but {len(references)} references: pass reference_ids")
    reference_labels = check_integers(labels if reference_labels is None else reference_labels, "labels", references)
    reference_ids = ids if reference_ids is None else reference_ids
    return References(
        references, reference_labels, None if reference_ids is None else check_integers(reference_ids, "ids", references)
    )


def _pair_with_references(
    labels: Tensor, references: References, memory: Memory | None, ids: Tensor | None, exclude: str, sound: Tensor | None
) -> Pairing:
    """The pairing of anchors that meet live rows. A memory row that is live among the references does not count."""
    live, live_labels, live_ids = references
    if exclude != "none" and (ids is None or live_ids is None):
        raise InputError(f"exclude={exclude!r} with references excludes rows by their instance id: pass ids")
    counts = torch.ones_like(live_labels, dtype=torch.bool)
    if len(live):
        counts = sound_rows(live.detach(), counts, live_ids, 0, "references")
    if live.device.type != "cpu":  # an unsound reference could not raise there; it must not spread NaN
        live = torch.where(counts[:, None], live, 0)
    stamps, row_ids = counts.long() - 1, live_ids if exclude == "instance" else None
    own = None
    if exclude == "copy":
        assert ids is not None and live_ids is not None
        own = last_match(ids, live_ids)
    if memory is None:
        return Pairing(live, live_labels, stamps, labels, sound, ids, row_ids, own)
    if live_ids is not None and live_ids.device.type == "cpu" and sound is not None:
        sound = all_named(memory.row_ids, memory.stamps, sound)
    if own is not None:
        assert ids is not None
        older = memory.latest_copies(ids)
        own = torch.where(own < 0, torch.where(older < 0, -1, older + len(live)), own)
    stamps = torch.cat([stamps, torch.where(live_rows(memory, references), -1, memory.stamps)])
    row_labels = torch.cat([live_labels, memory.row_labels])
    if row_ids is not None:
        row_ids = torch.cat([row_ids, memory.row_ids])
    return Pairing(memory.rows, row_labels, stamps, labels, sound, ids, row_ids, own, references=live)


def live_rows(memory: Memory, references: References) -> Tensor:
    """(M,): the memory's rows that are live among the references.

    With ids these are the rows whose id is there. Without ids, they are the rows of the latest enqueue if that wrote the
    references, row for row. So a batch counts once, whether it is enqueued before or after the loss is computed.
    """
    r = len(references.rows)
    if r == 0:
        return torch.zeros_like(memory.stamps, dtype=torch.bool)
    if references.ids is not None:
        return among(memory.row_ids, references.ids)
    slots, size = memory.latest_slots(r), len(memory.stamps)
    inside = slots.clamp(min=0)
    same = (memory.rows.detach()[inside] == references.rows.detach().to(memory.rows.dtype)).all(1)
    same &= memory.row_labels[inside] == references.labels
    written = (same | (slots < 0)).all() & (memory.latest == r)
    age = (memory.pointer - 1 - torch.arange(size, device=slots.device)) % size
    return written & (age < r)


def among(values: Tensor, some: Tensor) -> Tensor:
    """Which of the values are among some others, of which there is at least one; without a host sync."""
    distinct = some.sort().values
    return distinct[torch.searchsorted(distinct, values).clamp(max=len(distinct) - 1)] == values


def last_match(ids: Tensor, live_ids: Tensor) -> Tensor:
    """(m,): the last place at which each id stands among the live ones, -1 where it does not."""
    if len(live_ids) == 0:
        return torch.full_like(ids, -1)
    return torch.where(ids[:, None] == live_ids, torch.arange(len(live_ids), device=ids.device), -1).amax(1)


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
