"""Running sums of one side of a loss: values, log-sum-exp and the gradient rows that belong to them, fed tile by tile."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.terms import Side, Terms


class Sums:
    """Adds up what pairs contribute to their anchors. `rows` is the tile (T, D) that the pairs' row numbers refer to."""

    def __init__(self, m: int, like: Tensor) -> None:
        self.side = Side.empty(m, like)
        self.peak = self.side.lse.clone()  # (m,), the largest logit so far
        self.mass = torch.zeros_like(self.peak)  # Σ e^{logit − peak}
        self.pull: Tensor | None = None  # (m, D), Σ weight·v
        self.soft: Tensor | None = None  # (m, D), Σ e^{logit − peak}·slope·v

    def add_tile(self, t: Terms, valid: Tensor, rows: Tensor) -> None:
        """All pairs of a tile at once: terms and `valid` are (T, m)."""
        self.side.count += (valid if not isinstance(t.slope, Tensor) else valid & (t.slope > 0)).sum(0)
        if t.value is not None:
            self.side.value += torch.where(valid, t.value, 0).sum(0)
            weight = torch.where(valid, t.weight, 0) if isinstance(t.weight, Tensor) else valid.to(rows.dtype) * t.weight
            self.side.weight += weight.sum(0)
            self.pull = _add(self.pull, weight.T @ rows)
        if t.logit is not None:
            logit = torch.where(valid, t.logit, -torch.inf)
            self._raise_peak(torch.maximum(self.peak, logit.amax(0)))
            mass = (logit - self._finite_peak()).exp_()
            self.mass += mass.sum(0)
            self.soft = _add(self.soft, (mass.mul_(t.slope)).T @ rows)

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
            self.pull = _add(self.pull, F.embedding_bag(row, rows, starts, mode="sum", per_sample_weights=weight))
        if t.logit is not None:
            self._raise_peak(self.peak.scatter_reduce(0, anchor, t.logit, "amax"))
            mass = (t.logit - self._finite_peak()[anchor]).exp_()
            self.mass.index_add_(0, anchor, mass)
            weight = mass * t.slope
            self.soft = _add(self.soft, F.embedding_bag(row, rows, starts, mode="sum", per_sample_weights=weight))

    def _raise_peak(self, peak: Tensor) -> None:
        shrink = torch.where(self.peak > -torch.inf, self.peak - peak, -torch.inf).exp()
        self.peak, self.mass = peak, self.mass * shrink
        if self.soft is not None:
            self.soft.mul_(shrink[:, None])

    def _finite_peak(self) -> Tensor:
        return self.peak.where(self.peak > -torch.inf, 0)

    def finish(self) -> Side:
        self.side.lse = self.peak + self.mass.log()
        return self.side

    def gradient(self, of_sum: Tensor | float, of_lse: Tensor | float) -> Tensor | float:
        """(m, D): the side's Σ w_ij·v_j, once the coefficients are known."""
        total: Tensor | float = 0.0
        if self.pull is not None:
            total = total + _column(of_sum) * self.pull
        if self.soft is not None:
            total = total + _column(of_lse / self.mass.where(self.mass > 0, 1)) * self.soft
        return total


def weigh(t: Terms, valid: Tensor, lse: Tensor, of_sum: Tensor | float, of_lse: Tensor | float) -> Tensor:
    """The weights w of the pairs at hand, once the sums are finished: of a tile (T, m), per-anchor tensors being (m,)."""
    total = torch.zeros((), dtype=lse.dtype, device=lse.device)
    if t.value is not None:
        total = total + of_sum * t.weight
    if t.logit is not None:
        total = total + of_lse * (t.logit - lse).exp() * t.slope
    return torch.where(valid, total, 0)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _column(x: Tensor | float) -> Tensor | float:
    return x[:, None] if isinstance(x, Tensor) else x
