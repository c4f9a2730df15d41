"""The running sums of one side of a loss, over tiles of rows and over single pairs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.terms import Shards, Side, Terms


class Sums:
    """Running sums of one side of a loss: values, log-sum-exp, and the gradient rows that belong to them."""

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
