"""Value and gradient in one pass over the bank, tile by tile; never an (m, M) matrix.

Only anchors need a gradient, and a pair's weight is known from its similarity: so each tile of rows is multiplied with
the anchors, weighed, and added to the anchors' gradients while it is still in the cache. On the CPU the few positives are
listed and met first, and a tile with few valid negatives adds just those rows. Elsewhere, where looking would
stop the device, everything keeps a fixed shape and positives get passes of their own.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing, count_related, list_related
from xbm.engine.shards import Shards
from xbm.engine.sums import Sums, weigh
from xbm.engine.terms import Loss, Terms, statistics
from xbm.engine.whole import whole

TILE = 1 << 20  # numbers in a tile of rows, and in its similarities
SPARSE = 0.04  # share of valid negatives up to which a tile adds single rows: measured, see benchmarks/losses.py
SMALL = 1 << 14  # pairs up to which everything is done at once: there the number of operations counts, not their size
LISTED = 0.02  # share of positives up to which they are listed
MOST_LISTED = 100_000  # and their number, which bounds the memory
COLUMNS = 1 << 21  # similarities at once where anchors take the whole bank in turn


class Result(NamedTuple):
    loss: Tensor  # (m,), each anchor's
    gradient: Tensor  # (m, D)
    row_gradient: Tensor | None  # (M, D)
    statistics: tuple[Tensor, ...]  # five of (m,)


def compare(loss: Loss, anchors: Tensor, pairing: Pairing, row_gradient: bool, stats: bool) -> Result:
    """Each anchor's loss, and the gradient of their sum in the anchors and, if asked for, in the rows."""
    anchors = anchors.to(torch.promote_types(anchors.dtype, torch.float32))
    if len(anchors) * len(pairing.stamps) <= SMALL:
        return _by_anchors(loss, anchors, pairing, row_gradient)
    if _few_positives(pairing):
        return _Listed(loss, anchors, pairing, stats).run(row_gradient)
    if loss.ranks_positives:
        return _by_anchors(loss, anchors, pairing, row_gradient)
    return _Dense(loss, anchors, pairing, stats).run(row_gradient)


def compare_shard(loss: Loss, anchors: Tensor, pairing: Pairing, row_gradient: bool, stats: bool, shards: Shards) -> Result:
    """The same where the pairing's rows are one shard of the bank, and every other holder calls this with the same anchors.

    Losses and statistics are those of the whole bank, and so is the gradient of the shard's rows; that of the anchors is this
    shard's part, to be summed over the holders.
    """
    anchors = anchors.to(torch.promote_types(anchors.dtype, torch.float32))
    listed = loss.ranks_positives or _few_positives(pairing)
    return (_Listed if listed else _Dense)(loss, anchors, pairing, stats).run(row_gradient, shards)


def _few_positives(pairing: Pairing) -> bool:
    if pairing.labels.device.type != "cpu":
        return False
    pairs = len(pairing.labels) * len(pairing.stamps)
    return count_related(pairing) <= min(LISTED * pairs + 1000, MOST_LISTED)


class _Pass:
    """What both ways of meeting the positives share: the pass over the negatives, and putting things together."""

    def __init__(self, loss: Loss, anchors: Tensor, pairing: Pairing, stats: bool) -> None:
        self.loss, self.anchors, self.pairing, self.stats = loss, anchors, pairing, stats
        self.p, self.n = Sums(len(anchors), anchors), Sums(len(anchors), anchors)

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows (T, D) and their similarities (T, m): with the rows first the product is the faster one."""
        step = _height(self.anchors)
        for start in range(0, len(self.pairing.rows), step):
            cut = slice(start, min(start + step, len(self.pairing.rows)))
            rows = self.pairing.rows[cut].to(self.anchors.dtype)
            yield cut, rows, rows @ self.anchors.T

    def meet_positives(self) -> None:
        """The extremes (and ranks) of the positives, which decide which negatives are valid."""
        raise NotImplementedError

    def join_positives(self, shards: Shards) -> None:
        """Makes what `meet_positives` found in a shard that of the whole bank."""
        side = self.p.side
        if isinstance(self.loss.floor(side), Tensor) or self.stats:
            lowest, side.highest = shards.maximum(torch.stack([-side.lowest, side.highest])).unbind()
            side.lowest = -lowest

    def add_positives(self) -> None:
        raise NotImplementedError

    def bar(self, cut: slice, S: Tensor) -> None:
        """Sets the similarity of everything that is not a negative to -inf."""
        raise NotImplementedError

    def weigh_positives(self, cut: slice, S: Tensor, c: tuple) -> Tensor:
        """(T, m): the final weights of the positives of a tile."""
        raise NotImplementedError

    def add_negatives(self, cut: slice, S: Tensor, hot: Tensor, rows: Tensor) -> None:
        self._add_whole_tile(S, hot, rows)

    def _add_whole_tile(self, S: Tensor, hot: Tensor, rows: Tensor) -> None:
        t = self.loss.negative(S, self.p.side, _same)
        self.n.add_tile(t, hot, rows)
        if self.p.side.beaten is not None and t.beaten is not None:
            self.p.side.beaten += t.beaten

    def run(self, row_gradient: bool, shards: Shards | None = None) -> Result:
        self.meet_positives()
        if shards is not None:
            self.join_positives(shards)
        floor = self.loss.floor(self.p.side)
        for cut, rows, S in self.tiles():
            self.bar(cut, S)
            self.n.side.highest = torch.maximum(self.n.side.highest, S.amax(0))
            self.add_negatives(cut, S, floor < S, rows)
        n = self.n.finish(shards)
        if shards is not None and self.p.side.beaten is not None:
            self.p.side.beaten = shards.sum(self.p.side.beaten)
        self.add_positives()
        p = self.p.finish(shards)
        c = self.loss.combine(p, n)
        gradient = self.n.gradient(c.negative_sum, c.negative_lse) - self.p.gradient(c.positive_sum, c.positive_lse)
        if not isinstance(gradient, Tensor):
            gradient = torch.zeros_like(self.anchors)
        of_rows = None
        if row_gradient:
            of_rows = torch.empty_like(self.pairing.rows, dtype=self.anchors.dtype)
            for cut, _, S in self.tiles():
                favour = self.weigh_positives(cut, S, (p, n, c.positive_sum, c.positive_lse))
                self.bar(cut, S)
                against = self.loss.negative(S, p, _same)
                weights = weigh(against, floor < S, n.lse, c.negative_sum, c.negative_lse) - favour
                of_rows[cut] = weights @ self.anchors
        return Result(c.loss, gradient, of_rows, statistics(c.active, p, n))


class _Listed(_Pass):
    """Positives as a list of pairs, ordered by anchor and similarity. Shapes depend on the data: for the CPU."""

    def meet_positives(self) -> None:
        related = list_related(self.pairing)
        self.related = related
        row, anchor = related.row[related.positive], related.anchor[related.positive]
        s = _similarities(self.anchors, self.pairing.rows, anchor, row)
        order = s.argsort(stable=True)
        order = order[anchor[order].argsort(stable=True)]
        self.row, self.anchor, self.s = row[order], anchor[order], s[order]
        side = self.p.side
        side.lowest = side.lowest.scatter_reduce(0, self.anchor, self.s, "amin")
        side.highest = side.highest.scatter_reduce(0, self.anchor, self.s, "amax")
        if self.loss.ranks_positives:
            each = torch.bincount(self.anchor, minlength=len(self.anchors))
            self.rank = torch.arange(len(self.s), device=self.s.device) - (each.cumsum(0) - each)[self.anchor]
            most = int(each.max()) if len(each) else 0
            side.ranked = self.s.new_full((most, len(self.anchors)), torch.inf)
            side.ranked[self.rank, self.anchor] = self.s
            side.beaten = torch.zeros_like(side.ranked, dtype=torch.int64)

    def join_positives(self, shards: Shards) -> None:
        super().join_positives(shards)
        side = self.p.side
        if side.ranked is None:
            return
        parts = shards.everyone(side.ranked)
        merged, order = torch.cat(parts).sort(dim=0, stable=True)  # (P of all shards, m)
        place = torch.empty_like(order)
        place.scatter_(0, order, torch.arange(len(order), device=order.device)[:, None].expand_as(order))
        before = sum(len(part) for part in parts[: shards.rank])
        self.rank = place[before + self.rank, self.anchor]
        most = int((merged < torch.inf).sum(0).max()) if merged.numel() else 0
        side.ranked = merged[:most].contiguous()
        side.beaten = torch.zeros_like(side.ranked, dtype=torch.int64)

    def bar(self, cut: slice, S: Tensor) -> None:
        first, last = torch.searchsorted(self.related.row, self.related.row.new_tensor([cut.start, cut.stop])).tolist()
        if last > first:
            S[self.related.row[first:last] - cut.start, self.related.anchor[first:last]] = -torch.inf
        unwritten = self.pairing.stamps[cut] < 0
        if bool(unwritten.any()):
            S[unwritten] = -torch.inf

    def add_negatives(self, cut: slice, S: Tensor, hot: Tensor, rows: Tensor) -> None:
        found = int(hot.count_nonzero())
        if found == 0:
            return
        if found > SPARSE * hot.numel():
            return self._add_whole_tile(S, hot, rows)
        anchor, row = hot.T.nonzero(as_tuple=True)  # ordered by anchor

        def spread(x: Tensor) -> Tensor:
            return x[anchor]

        s = S[row, anchor]
        t = self.loss.negative(s, self.p.side, spread)
        self.n.add_list(t, anchor, row, rows)
        if self.p.side.beaten is not None:
            assert t.beaten is not None
            self.p.side.beaten += t.beaten
        return None

    def _terms(self) -> tuple[Terms, Tensor]:
        """The positives' terms, and which of them are valid."""
        everyone = torch.ones_like(self.s, dtype=torch.bool)
        if self.p.side.beaten is not None:
            weight = self.p.side.beaten[self.rank, self.anchor].to(self.s.dtype)
            return Terms(value=torch.zeros_like(self.s), weight=weight), weight > 0
        t = self.loss.positive(self.s, self.n.side, lambda x: x[self.anchor])
        return t, everyone if t.valid is None else t.valid

    def add_positives(self) -> None:
        t, valid = self._terms()
        if not bool(valid.all()):
            t = t.pick(valid)
        row, anchor = self.row[valid], self.anchor[valid]
        used, row = row.unique(return_inverse=True)
        self.p.add_list(t, anchor, row, self.pairing.rows[used].to(self.anchors.dtype))

    def weigh_positives(self, cut: slice, S: Tensor, c: tuple) -> Tensor:
        p, _, of_sum, of_lse = c
        t, valid = self._terms()
        here = valid & (self.row >= cut.start) & (self.row < cut.stop)

        def each(x: Tensor | float) -> Tensor | float:
            return x[self.anchor] if isinstance(x, Tensor) else x

        weights = weigh(t, here, p.lse[self.anchor], each(of_sum), each(of_lse))
        favour = torch.zeros_like(S)
        favour.index_put_((self.row[here] - cut.start, self.anchor[here]), weights[here])
        return favour


class _Dense(_Pass):
    """Positives by mask, in passes of their own. All shapes are fixed: for other devices, and for many positives."""

    def meet_positives(self) -> None:
        side = self.p.side
        if not isinstance(self.loss.floor(side), Tensor) and not self.stats:
            return  # nothing depends on the extremes
        for cut, _, S in self.tiles():
            positive, _ = self.pairing.masks(cut.start, cut.stop)
            side.lowest = torch.minimum(side.lowest, S.masked_fill(~positive, torch.inf).amin(0))
            side.highest = torch.maximum(side.highest, S.masked_fill(~positive, -torch.inf).amax(0))

    def bar(self, cut: slice, S: Tensor) -> None:
        _, negative = self.pairing.masks(cut.start, cut.stop)
        S.masked_fill_(~negative, -torch.inf)

    def _terms(self, cut: slice, S: Tensor) -> tuple[Terms, Tensor]:
        positive, _ = self.pairing.masks(cut.start, cut.stop)
        t = self.loss.positive(S, self.n.side, _same)
        return t, positive if t.valid is None else positive & t.valid

    def add_positives(self) -> None:
        for cut, rows, S in self.tiles():
            self.p.add_tile(*self._terms(cut, S), rows)

    def weigh_positives(self, cut: slice, S: Tensor, c: tuple) -> Tensor:
        p, _, of_sum, of_lse = c
        return weigh(*self._terms(cut, S), p.lse, of_sum, of_lse)


def _by_anchors(loss: Loss, anchors: Tensor, pairing: Pairing, row_gradient: bool) -> Result:
    """A few anchors against the whole bank at a time: for a loss whose pairs meet each other (triplet), without lists."""
    together = max(1, COLUMNS // max(1, len(pairing.rows)))
    parts = []
    of_rows = torch.zeros_like(pairing.rows, dtype=anchors.dtype) if row_gradient else None
    for start in range(0, len(anchors), together):
        cut = slice(start, start + together)
        some = pairing._replace(
            labels=pairing.labels[cut],
            sound=None if pairing.sound is None else pairing.sound[cut],
            ids=None if pairing.ids is None else pairing.ids[cut],
            own=None if pairing.own is None else pairing.own[cut],
        )
        S = torch.cat([S for _, _, S in _Pass(loss, anchors[cut], some, False).tiles()])
        positive, negative = some.masks()
        found = whole(loss, S, positive, negative)
        weights = found.negative_weights - found.positive_weights  # (M, g)
        gradient = torch.zeros_like(anchors[cut])
        height = _height(anchors)
        for rows, part in zip(pairing.rows.split(height), weights.split(height)):
            gradient.addmm_(part.T, rows.to(anchors.dtype))  # widened again: a half bank is never held wide as a whole
        if of_rows is not None:
            of_rows.addmm_(weights, anchors[cut])
        parts.append((found.combined.loss, gradient, *statistics(found.combined.active, found.p, found.n)))
    losses, gradient, *found_statistics = (torch.cat(column) for column in zip(*parts))
    return Result(losses, gradient, of_rows, tuple(found_statistics))


def _height(anchors: Tensor) -> int:
    """Rows of a tile, so that neither they nor their similarities pass TILE numbers."""
    numbers = TILE if anchors.device.type == "cpu" else 32 * TILE  # a GPU has no small cache to stay in, but launches to save
    return max(1, numbers // max(anchors.shape))


def _similarities(anchors: Tensor, rows: Tensor, anchor: Tensor, row: Tensor, block: int = 1024) -> Tensor:
    """(n,): of single pairs, a block at a time so that the gathered rows stay few."""
    parts = [(anchors[a] * rows[r].to(anchors.dtype)).sum(1) for a, r in zip(anchor.split(block), row.split(block))]
    return torch.cat(parts) if parts else anchors.new_zeros(0)


def _same(x: Tensor) -> Tensor:
    return x
