"""Running sums of one side of a loss: values, log-sum-exp and the gradient rows that belong to them, fed tile by tile."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.shards import Shards
from xbm.engine.terms import Side, Terms


class Sums:
    """Adds up what pairs contribute to their anchors. `rows` is the tile (T, D) that the pairs' row numbers refer to."""

    def __init__(self, m: int, like: Tensor) -> None:
        self.side = Side.empty(m, like)
        self.peak = self.side.lse.clone()  # (m,), the largest logit so far
        self.mass = torch.zeros_like(self.peak)  # Σ e^{logit − peak}
        # Gradients lie anchor last, (D, m): rows.T @ weights is the faster of the two products.
        self.pull: Tensor | None = None  # Σ weight·v
        self.soft: Tensor | None = None  # Σ e^{logit − peak}·slope·v

    def add_tile(self, t: Terms, valid: Tensor, rows: Tensor) -> None:
        """All pairs of a tile at once: terms and `valid` are (T, m). The terms are used up: most of the time goes into new
        memory, so they are masked in place."""
        count = (valid if not isinstance(t.slope, Tensor) else valid & (t.slope > 0)).sum(0)
        self.side.count += count
        out = ~valid
        if t.logit is not None:
            logit = t.logit.masked_fill(out, -torch.inf) if t.logit is t.value else t.logit.masked_fill_(out, -torch.inf)
            self._raise_peak(torch.maximum(self.peak, logit.amax(0)))
            mass = logit.sub_(self._finite_peak()).exp_()
            self.mass += mass.sum(0)
            self.soft = _product(self.soft, rows, mass.mul_(t.slope))
        if t.value is not None:
            self.side.value += t.value.masked_fill_(out, 0).sum(0)
            if isinstance(t.weight, Tensor):
                weight = t.weight.masked_fill_(out, 0)
                self.side.weight += weight.sum(0)
            else:
                weight = valid.to(rows.dtype)
                if t.weight != 1:
                    weight *= t.weight
                self.side.weight += count * t.weight
            self.pull = _product(self.pull, rows, weight)

    def add_list(self, t: Terms, anchor: Tensor, row: Tensor, rows: Tensor) -> None:
        """Single pairs, ordered by anchor: terms, `anchor` and `row` are (n,)."""
        m = len(self.peak)
        each = torch.bincount(anchor, minlength=m)
        starts = each.cumsum(0) - each
        if isinstance(t.slope, Tensor):
            self.side.count.index_add_(0, anchor, (t.slope > 0).long())
        else:
            self.side.count += each
        if t.value is not None:
            weight = t.weight if isinstance(t.weight, Tensor) else torch.full_like(t.value, t.weight)
            self.side.value.index_add_(0, anchor, t.value)
            self.side.weight.index_add_(0, anchor, weight)
            self.pull = _gather(self.pull, rows, row, starts, weight)
        if t.logit is not None:
            self._raise_peak(self.peak.scatter_reduce(0, anchor, t.logit, "amax"))
            mass = (t.logit - self._finite_peak()[anchor]).exp_()
            self.mass.index_add_(0, anchor, mass)
            weight = mass * t.slope
            self.soft = _gather(self.soft, rows, row, starts, weight)

    def _raise_peak(self, peak: Tensor) -> None:
        shrink = torch.where(self.peak > -torch.inf, self.peak - peak, -torch.inf).exp()
        self.peak, self.mass = peak, self.mass * shrink
        if self.soft is not None:
            self.soft.mul_(shrink)

    def _finite_peak(self) -> Tensor:
        return self.peak.where(self.peak > -torch.inf, 0)

    def finish(self, shards: Shards | None = None) -> Side:
        """The side, complete. With `shards` these sums are of one shard: all but the gradient rows become those of the bank."""
        side = self.side
        if shards is not None:
            peak, side.highest = shards.maximum(torch.stack([self.peak, side.highest])).unbind()
            self._raise_peak(peak)
            parts = [part.double() for part in (side.count, side.value, side.weight, self.mass)]  # a count needs 53 bits
            count, *sums = shards.sum(torch.stack(parts)).unbind()
            side.count = count.long()
            side.value, side.weight, self.mass = (total.to(peak.dtype) for total in sums)
        side.lse = self.peak + self.mass.log()
        return side

    def gradient(self, of_sum: Tensor | float, of_lse: Tensor | float) -> Tensor | float:
        """(m, D): the side's Σ w_ij·v_j, once the coefficients are known."""
        total: Tensor | float = 0.0
        if self.pull is not None:
            total = total + of_sum * self.pull
        if self.soft is not None:
            total = total + of_lse / self.mass.where(self.mass > 0, 1) * self.soft
        return total.T if isinstance(total, Tensor) else total


def weigh(t: Terms, valid: Tensor, lse: Tensor, of_sum: Tensor | float, of_lse: Tensor | float) -> Tensor:
    """The weights w of the pairs at hand, once the sums are finished: of a tile (T, m), per-anchor tensors being (m,)."""
    total = torch.zeros((), dtype=lse.dtype, device=lse.device)
    if t.value is not None:
        total = total + of_sum * t.weight
    if t.logit is not None:
        total = total + of_lse * (t.logit - lse).exp() * t.slope
    return torch.where(valid, total, 0)


def _product(total: Tensor | None, rows: Tensor, weights: Tensor) -> Tensor:
    """Adds Σ_t weights[t, i]·rows[t] to each anchor's column."""
    return rows.T @ weights if total is None else total.addmm_(rows.T, weights)


def _gather(total: Tensor | None, rows: Tensor, row: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """The same for single pairs, ordered by anchor."""
    part = F.embedding_bag(row, rows, starts, mode="sum", per_sample_weights=weights).T
    return part if total is None else total.add_(part)
