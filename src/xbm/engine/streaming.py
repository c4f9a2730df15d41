"""The streaming engine: value and gradient in one pass over the rows, tile by tile, without the (m, M) matrix.

The weight of a pair follows from its similarity. So each tile of rows is multiplied with the anchors, weighted, and added to
the anchors' gradients while it is in the cache. Positives are few: on a CPU they are listed and compared first, and a tile
with few valid negatives adds only those rows. On other devices a decision that depends on data would stall the device, so
there all shapes are fixed, and positives get passes of their own.
"""

from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.dense import pair_weights, statistics, whole
from xbm.engine.pairing import Pairing, Related, Tile, list_related, tiles_of
from xbm.engine.terms import Loss, Result, Shards, Side, Terms

TILE = 1 << 20  # most numbers in a tile of rows, and in its similarities
SPARSE = 0.04  # share of valid negatives up to which a tile adds single rows: measured, see benchmarks/losses.py
SMALL = 1 << 14  # pairs up to which everything is done at once: the number of operations matters there, not their size
LISTED = 0.02  # share of positives up to which they are listed
MOST_LISTED = 100_000  # and their number, which bounds the memory
COLUMNS = 1 << 21  # similarities at once where a few anchors at a time are compared with all rows
TOGETHER = 512  # most anchors at once on a CPU, so that the working memory does not grow with the batch


@torch.no_grad()
def compare(
    loss: Loss,
    anchors: Tensor,
    pairing: Pairing,
    gradient: bool = True,
    row_gradient: bool = False,
    stats: bool = False,
    shards: Shards | None = None,
    *,
    reference_gradient: bool = False,
) -> Result:
    """The mean loss of the anchors (m, D), its gradient in the anchors and, if requested, in the rows and references.

    With `shards`, the pairing's rows are one shard of the memory, and every process calls this with the same anchors. Loss,
    statistics and row gradient are then those of the whole memory; the anchors' gradient is this shard's part of the sum.
    """
    wanted = reference_gradient, row_gradient
    with torch.autocast(anchors.device.type, enabled=False):
        if len(anchors) > TOGETHER and anchors.device.type == "cpu" and shards is None:
            return _in_blocks(loss, anchors, pairing, wanted, stats)
        return _compare(loss, anchors, pairing, wanted, stats, shards)


def _in_blocks(loss: Loss, anchors: Tensor, pairing: Pairing, wanted: tuple[bool, bool], stats: bool) -> Result:
    """TOGETHER anchors at a time; the mean is over all of them."""
    m = len(anchors)
    alone = pairing._replace(rows=anchors.detach(), in_batch=False) if pairing.in_batch else pairing
    gradient = torch.empty_like(anchors, dtype=torch.promote_types(anchors.dtype, torch.float32))
    losses, of_references, of_rows, extra, easiest = [], None, None, [], []
    for start in range(0, m, TOGETHER):
        cut = slice(start, min(start + TOGETHER, m))
        part = _compare(loss, anchors[cut], alone.of_anchors(cut), wanted, stats, None)
        share = (cut.stop - start) / m
        losses.append(part.loss * share)
        torch.mul(part.gradient, share, out=gradient[cut])
        of_references = _accumulate(of_references, part.reference_gradient, share)
        of_rows = _accumulate(of_rows, part.row_gradient, share)
        extra.append(part.statistics)
        easiest.append(part.easiest_positive)
    known = [x for x in easiest if x is not None]
    return Result(
        torch.stack(losses).sum(), gradient, of_rows, tuple(torch.cat(column) for column in zip(*extra)), None,
        of_references, torch.cat(known) if len(known) == len(easiest) else None,
    )  # fmt: skip


def _accumulate(total: Tensor | None, part: Tensor | None, share: float) -> Tensor | None:
    if part is None or total is None:
        return part if part is None else part.mul_(share)
    return total.add_(part, alpha=share)


def _compare(
    loss: Loss, anchors: Tensor, pairing: Pairing, wanted: tuple[bool, bool], stats: bool, shards: Shards | None
) -> Result:
    assert pairing.sound is not None
    if anchors.device.type != "cpu":  # an unsound anchor could not raise there; it must not spread NaN
        anchors = torch.where(pairing.sound[:, None], anchors, 0)
    rows = anchors if pairing.in_batch else pairing.rows.detach()
    parts = [rows] if pairing.references is None else [pairing.references.detach(), rows]
    anchors = anchors.to(torch.promote_types(anchors.dtype, torch.float32))
    gradients = [torch.zeros_like(x, dtype=anchors.dtype) if need else None for x, need in zip(parts, wanted[-len(parts) :])]
    m, M = len(anchors), sum(map(len, parts))
    tiles = tiles_of(parts, tile_height(anchors))
    small = shards is None and m * M <= SMALL
    most = None if shards is not None and loss.ranks_positives else min(LISTED * m * M + 1000, MOST_LISTED)
    related = list_related(pairing, most) if not small and (most is None or anchors.device.type == "cpu") else None
    if small or (related is None and loss.ranks_positives):
        return _by_anchors(loss, anchors, tiles, pairing, gradients)

    p, n = Sums(anchors), Sums(anchors)
    given = loss, anchors, pairing, p.side
    positives = _Masked(*given, tiles, stats) if related is None else _Listed(*given, parts, related)
    if shards is not None:
        if _needs_extremes(loss, p.side, stats):
            lowest, p.side.highest = shards.maximum(torch.stack([-p.side.lowest, p.side.highest]), "extremes").unbind()
            p.side.lowest = -lowest
        if isinstance(positives, _Listed):
            positives.join_ranks(shards)
    for start, narrow, *_ in tiles:
        tile = narrow.to(anchors.dtype)  # a half-precision bank is widened tile by tile, never as a whole
        S = tile @ anchors.T  # (T, m): with the rows first the product is faster
        positives.leave_negatives(S, start)
        n.side.highest = torch.maximum(n.side.highest, S.amax(0))
        valid = loss.floor(p.side) < S
        count = int(valid.count_nonzero()) if related is not None else None
        if count == 0:
            continue
        if count is not None and count <= SPARSE * valid.numel():
            anchor, row = valid.T.nonzero(as_tuple=True)  # ordered by anchor
            terms = loss.negative(S[row, anchor], p.side, itemgetter(anchor))
            n.add_list(terms, anchor, row, tile)
        else:
            terms = loss.negative(S, p.side, lambda x: x)
            n.add_tile(terms, valid, tile)
        if p.side.beaten is not None and terms.beaten is not None:
            p.side.beaten += terms.beaten
    n.finish(shards)
    if shards is not None and p.side.beaten is not None:
        p.side.beaten = shards.sum(p.side.beaten, "sums")
    positives.add_to(p, n.side)
    p.finish(shards)

    c = loss.combine(p.side, n.side)
    gradient = n.gradient(c.negative_sum, c.negative_lse) - p.gradient(c.positive_sum, c.positive_lse)
    if not isinstance(gradient, Tensor):  # neither side has a pair
        gradient = torch.zeros_like(anchors)
    for start, narrow, part, cut in tiles:
        if (total := gradients[part]) is None:
            continue
        S = narrow.to(anchors.dtype) @ anchors.T
        attraction = positives.weights(S, start, p.side, n.side, c.positive_sum, c.positive_lse)
        positives.leave_negatives(S, start)
        terms = loss.negative(S, p.side, lambda x: x)
        repulsion = pair_weights(terms, loss.floor(p.side) < S, n.side.lse, c.negative_sum, c.negative_lse)
        total[cut] = (repulsion - attraction) @ anchors / max(1, m)
    extra = statistics(c.active, p.side, n.side) if stats else ()
    easiest = p.side.highest if stats or (related is not None and shards is None) else None
    of_references, of_rows = [None, *gradients][-2:]
    return Result(c.loss.sum() / max(1, m), gradient / max(1, m), of_rows, extra, None, of_references, easiest)


# ------------------------------------------------------------------ the running sums of one side


class Sums:
    """Running sums of one side of a loss, over tiles of rows and over single pairs.

    They are values, log-sum-exp, and the gradient rows that belong to them.
    """

    def __init__(self, anchors: Tensor) -> None:
        zero = anchors.new_zeros(len(anchors))
        inf = torch.full_like(zero, torch.inf)
        self.side = Side(inf, -inf, torch.zeros_like(zero, dtype=torch.int64), zero, zero.clone(), -inf)
        self.peak = -inf  # (m,), the largest logit so far
        self.mass = zero.clone()  # Σ e^{logit − peak}
        # Gradients have the anchors last, (D, m): rows.T @ weights is the faster of the two products.
        self.of_values: Tensor | None = None  # Σ weight·v
        self.of_logits: Tensor | None = None  # Σ e^{logit − peak}·slope·v

    def add_tile(self, t: Terms, valid: Tensor, rows: Tensor) -> None:
        """Adds all pairs of a tile: terms and `valid` are (T, m), rows (T, D).

        The terms are overwritten: most of the time goes into allocating memory, so they are masked in place.
        """
        # not slope > 0: a slope of NaN must reach the loss, not empty the side
        count = (valid & ~(t.slope <= 0) if isinstance(t.slope, Tensor) else valid).sum(0)
        self.side.count += count
        invalid = ~valid
        if t.logit is not None:
            logit = t.logit if t.logit is not t.value else t.logit.clone()
            logit.masked_fill_(invalid, -torch.inf)
            self._raise_peak(torch.maximum(self.peak, logit.amax(0)))
            mass = logit.sub_(self._finite_peak()).exp_()
            self.mass += mass.sum(0)
            self.of_logits = _product(self.of_logits, rows, mass.mul_(t.slope))
        if t.value is not None:
            self.side.value += t.value.masked_fill_(invalid, 0).sum(0)
            if isinstance(t.weight, Tensor):
                weight = torch.where(valid, t.weight, 0).to(rows.dtype)
                self.side.weight += weight.sum(0)
            else:
                weight = valid.to(rows.dtype)
                if t.weight != 1:
                    weight *= t.weight
                self.side.weight += count * t.weight
            self.of_values = _product(self.of_values, rows, weight)

    def add_list(self, t: Terms, anchor: Tensor, row: Tensor, rows: Tensor) -> None:
        """Adds single pairs, ordered by anchor: terms, `anchor` and `row` (an index into `rows`) are (n,)."""
        each = torch.bincount(anchor, minlength=len(self.peak))
        starts = each.cumsum(0) - each
        if isinstance(t.slope, Tensor) and t.slope.dim():
            self.side.count.index_add_(0, anchor, (~(t.slope <= 0)).long())
        else:
            self.side.count += each
        if t.value is not None:
            weight = torch.as_tensor(t.weight, dtype=t.value.dtype, device=t.value.device).expand_as(t.value).contiguous()
            self.side.value.index_add_(0, anchor, t.value)
            self.side.weight.index_add_(0, anchor, weight)
            self.of_values = _gather(self.of_values, rows, row, starts, weight)
        if t.logit is not None:
            self._raise_peak(self.peak.scatter_reduce(0, anchor, t.logit, "amax"))
            mass = (t.logit - self._finite_peak()[anchor]).exp_()
            self.mass.index_add_(0, anchor, mass)
            self.of_logits = _gather(self.of_logits, rows, row, starts, mass * t.slope)

    def _raise_peak(self, peak: Tensor) -> None:
        shrink = torch.where(self.peak > -torch.inf, self.peak - peak, -torch.inf).exp()
        self.peak, self.mass = peak, self.mass * shrink
        if self.of_logits is not None:
            self.of_logits.mul_(shrink)

    def _finite_peak(self) -> Tensor:
        return self.peak.where(self.peak > -torch.inf, 0)

    def finish(self, shards: Shards | None = None) -> Side:
        """Completes the side. With `shards`, all but the gradient rows become those of the whole memory."""
        side = self.side
        if shards is not None:
            peak, side.highest = shards.maximum(torch.stack([self.peak, side.highest]), "extremes").unbind()
            self._raise_peak(peak)
            parts = [part.double() for part in (side.count, side.value, side.weight, self.mass)]  # a count needs 53 bits
            count, *sums = shards.sum(torch.stack(parts), "sums").unbind()
            side.count = count.long()
            side.value, side.weight, self.mass = (total.to(peak.dtype) for total in sums)
        side.lse = self.peak + self.mass.log()
        return side

    def gradient(self, sum_scale: Tensor | float, lse_scale: Tensor | float) -> Tensor | float:
        """(m, D): Σ w_ij·v_j of the side, once the coefficients are known; 0.0 if nothing was added."""
        total: Tensor | float = 0.0
        if self.of_values is not None:
            total = total + sum_scale * self.of_values
        if self.of_logits is not None:
            total = total + lse_scale / self.mass.where(self.mass > 0, 1) * self.of_logits
        return total.T if isinstance(total, Tensor) else total


def _product(total: Tensor | None, rows: Tensor, weights: Tensor) -> Tensor:
    """Adds Σ_t weights[t, i]·rows[t] to each anchor's column."""
    return rows.T @ weights if total is None else total.addmm_(rows.T, weights)


def _gather(total: Tensor | None, rows: Tensor, row: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """The same for single pairs, ordered by anchor."""
    part = F.embedding_bag(row, rows, starts, mode="sum", per_sample_weights=weights).T
    return part if total is None else total.add_(part)


# ------------------------------------------------------------------ the positives


class _Listed:
    """Positives as a list of pairs, ordered by anchor and similarity. Shapes depend on the data: for the CPU."""

    def __init__(self, loss: Loss, anchors: Tensor, pairing: Pairing, side: Side, rows: list[Tensor], related: Related) -> None:
        self.loss, self.anchors, self.rows, self.pairing, self.related = loss, anchors, rows, pairing, related
        row, anchor = related.row[related.positive], related.anchor[related.positive]
        blocks = zip(anchor.split(1024), row.split(1024))  # gathered rows stay few
        parts = [(anchors[a] * _take(rows, r, anchors.dtype)).sum(1) for a, r in blocks]
        s = torch.cat(parts) if parts else anchors.new_zeros(0)
        order = s.argsort(stable=True)
        order = order[anchor[order].argsort(stable=True)]
        self.row, self.anchor, self.s = row[order], anchor[order], s[order]
        self.side = side
        side.lowest = side.lowest.scatter_reduce(0, self.anchor, self.s, "amin")
        side.highest = side.highest.scatter_reduce(0, self.anchor, self.s, "amax")
        if loss.ranks_positives:
            each = torch.bincount(self.anchor, minlength=len(anchors))
            self.rank = torch.arange(len(self.s), device=self.s.device) - (each.cumsum(0) - each)[self.anchor]
            most = int(each.max()) if len(each) else 0
            side.ranked = self.s.new_full((most, len(anchors)), torch.inf)
            side.ranked[self.rank, self.anchor] = self.s
            side.beaten = torch.zeros_like(side.ranked, dtype=torch.int64)

    def join_ranks(self, shards: Shards) -> None:
        """Turns ranks within this shard into those within the whole memory."""
        if self.side.ranked is None:
            return
        parts = shards.everyone(self.side.ranked, "positives")
        merged, order = torch.cat(parts).sort(dim=0, stable=True)  # (P of all shards, m)
        place = torch.empty_like(order)
        place.scatter_(0, order, torch.arange(len(order), device=order.device)[:, None].expand_as(order))
        before = sum(len(part) for part in parts[: shards.rank])
        self.rank = place[before + self.rank, self.anchor]
        most = int((merged < torch.inf).sum(0).max()) if merged.numel() else 0
        self.side.ranked = merged[:most].contiguous()
        self.side.beaten = torch.zeros_like(self.side.ranked, dtype=torch.int64)

    def leave_negatives(self, S: Tensor, start: int) -> None:
        """Sets the similarity of every pair that is not a negative to -inf."""
        first, last = torch.searchsorted(self.related.row, self.related.row.new_tensor([start, start + len(S)])).tolist()
        if last > first:
            S[self.related.row[first:last] - start, self.related.anchor[first:last]] = -torch.inf
        unwritten = self.pairing.stamps[start : start + len(S)] < 0
        if bool(unwritten.any()):
            S[unwritten] = -torch.inf

    def _terms(self, n: Side) -> tuple[Terms, Tensor]:
        """The terms of the positives, and which of them are valid."""
        if self.side.beaten is not None:
            weight = self.side.beaten[self.rank, self.anchor].to(self.s.dtype)
            return Terms(value=torch.zeros_like(self.s), weight=weight), weight > 0
        t = self.loss.positive(self.s, n, itemgetter(self.anchor))
        return t, torch.ones_like(self.s, dtype=torch.bool) if t.valid is None else t.valid

    def add_to(self, p: Sums, n: Side) -> None:
        t, valid = self._terms(n)
        if not bool(valid.all()):
            t = t.pick(valid)
        used, row = self.row[valid].unique(return_inverse=True)
        p.add_list(t, self.anchor[valid], row, _take(self.rows, used, self.anchors.dtype))

    def weights(self, S: Tensor, start: int, p: Side, n: Side, sum_scale: Tensor | float, lse_scale: Tensor | float) -> Tensor:
        """(T, m): the final weights of the positives in a tile."""
        t, valid = self._terms(n)
        here = valid & (self.row >= start) & (self.row < start + len(S))
        scales = (x[self.anchor] if isinstance(x, Tensor) else x for x in (sum_scale, lse_scale))
        weights = pair_weights(t, here, p.lse[self.anchor], *scales)
        return torch.zeros_like(S).index_put_((self.row[here] - start, self.anchor[here]), weights[here])


class _Masked:
    """Positives by mask, in passes of their own. All shapes are fixed: for other devices, and for many positives."""

    def __init__(self, loss: Loss, anchors: Tensor, pairing: Pairing, side: Side, tiles: list[Tile], stats: bool) -> None:
        self.loss, self.anchors, self.tiles, self.pairing, self.side = loss, anchors, tiles, pairing, side
        if not _needs_extremes(loss, side, stats):
            return
        for start, tile, *_ in tiles:
            S = tile.to(anchors.dtype) @ anchors.T
            positive, _ = pairing.masks(start, start + len(tile))
            side.lowest = torch.minimum(side.lowest, S.masked_fill(~positive, torch.inf).amin(0))
            side.highest = torch.maximum(side.highest, S.masked_fill(~positive, -torch.inf).amax(0))

    def leave_negatives(self, S: Tensor, start: int) -> None:
        _, negative = self.pairing.masks(start, start + len(S))
        S.masked_fill_(~negative, -torch.inf)

    def _terms(self, S: Tensor, start: int, n: Side) -> tuple[Terms, Tensor]:
        positive, _ = self.pairing.masks(start, start + len(S))
        t = self.loss.positive(S, n, lambda x: x)
        return t, positive if t.valid is None else positive & t.valid

    def add_to(self, p: Sums, n: Side) -> None:
        for start, narrow, *_ in self.tiles:
            tile = narrow.to(self.anchors.dtype)
            p.add_tile(*self._terms(tile @ self.anchors.T, start, n), tile)

    def weights(self, S: Tensor, start: int, p: Side, n: Side, sum_scale: Tensor | float, lse_scale: Tensor | float) -> Tensor:
        return pair_weights(*self._terms(S, start, n), p.lse, sum_scale, lse_scale)


def _by_anchors(loss: Loss, anchors: Tensor, tiles: list[Tile], pairing: Pairing, gradients: list[Tensor | None]) -> Result:
    """A few anchors at a time against all rows: for small problems, and for ranked positives that are too many to list."""
    together, m = max(1, COLUMNS // max(1, len(pairing.stamps))), len(anchors)
    parts = []
    for start in range(0, m, together):
        cut = slice(start, start + together)
        products = [tile.rows.to(anchors.dtype) @ anchors[cut].T for tile in tiles]
        S = torch.cat(products) if products else anchors[:0] @ anchors[cut].T
        pairs = whole(loss, S, *pairing.of_anchors(cut).masks())
        weights = pairs.negative_weights - pairs.positive_weights  # (M, g)
        gradient = torch.zeros_like(anchors[cut])
        for tile in tiles:
            of_tile = weights[tile.start : tile.start + len(tile.rows)]
            gradient.addmm_(of_tile.T, tile.rows.to(anchors.dtype))
            if (total := gradients[tile.part]) is not None:
                total[tile.cut].addmm_(of_tile, anchors[cut])
        parts.append((pairs.combined.loss, gradient, *statistics(pairs.combined.active, pairs.p, pairs.n)))
    losses, gradient, *extra = (torch.cat(column) for column in zip(*parts))
    of_references, of_rows = [None, *(total if total is None else total.div_(m) for total in gradients)][-2:]
    return Result(losses.sum() / m, gradient / m, of_rows, tuple(extra), None, of_references, extra[3])


def _needs_extremes(loss: Loss, side: Side, stats: bool) -> bool:
    """Whether anything depends on the extremes of the positives; a subclass does not inherit `ignores_extremes`."""
    return stats or isinstance(loss.floor(side), Tensor) or not vars(type(loss)).get("ignores_extremes", False)


def tile_height(anchors: Tensor) -> int:
    """Rows per tile, such that neither the tile nor its similarities exceed TILE numbers."""
    numbers = TILE if anchors.device.type == "cpu" else 32 * TILE  # a GPU has no small cache to fit, but launches to save
    return max(1, numbers // max(anchors.shape))


def _take(parts: list[Tensor], index: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, D): single rows of the references and the others."""
    if len(parts) == 1:
        return parts[0][index].to(dtype)
    r, taken = len(parts[0]), torch.empty((len(index), parts[0].shape[1]), dtype=dtype, device=index.device)
    taken[index < r], taken[index >= r] = parts[0][index[index < r]].to(dtype), parts[1][index[index >= r] - r].to(dtype)
    return taken
