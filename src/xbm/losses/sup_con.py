"""The supervised contrastive loss (Khosla et al. 2020), the form with the sum outside the logarithm."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xbm.engine.terms import Combined, Expand, Side, Terms, masked_lse
from xbm.errors import InputError
from xbm.losses.pair import PairLoss

LOWEST = math.log(0.01)  # of a learned log τ


class SupConLoss(PairLoss):
    """Cross-entropy over similarities, with any number of positives; with a single one it is InfoNCE.

    L_i = log Σ_{a∈P∪N} e^{S_ia/τ} − 1/|P| Σ_{k∈P} S_ik/τ; 0 for an anchor without positives.

    Weights: π_ij/τ for a negative, (1/|P| − π_ik)/τ for a positive, π the softmax over all of an anchor's pairs. This is
    the one loss here whose weights can fall below 0: a positive that already holds more than its 1/|P| of the softmax is
    pushed away. All reductions are the same.

    Args:
        temperature: τ.
        learn_temperature: whether τ is trained: `log_temperature` is then among the parameters, to be passed to the optimizer
            without weight decay. τ stays at 0.01 or above, which is where CLIP stops too. `.half()` and `.to(torch.bfloat16)`
            leave it in float32, because small steps would be rounded away.
        reduction: as for every `PairLoss`, and so are `engine` and `exclude`.

    Example:
        >>> loss_fn = SupConLoss(temperature=0.07, learn_temperature=True)
        >>> v, labels = torch.eye(4)[[0, 0, 1, 2]].requires_grad_(), torch.tensor([0, 0, 1, 1])
        >>> loss_fn(v, labels).backward()
        >>> loss_fn.log_temperature.grad is not None, round(float(loss_fn.temperature), 4)
        (True, 0.07)
    """

    name = "sup_con"
    kernel = "sup_con"
    one_reduction = True
    ignores_extremes = True
    hyperparameters: ClassVar = {"temperature": float}

    def __init__(
        self,
        temperature: float = 0.1,
        *,
        learn_temperature: bool = False,
        reduction: str = "sum",
        engine: str = "auto",
        exclude: str | None = None,
    ) -> None:
        super().__init__(reduction, engine, exclude)
        self.temperature = temperature
        if learn_temperature:
            self.log_temperature = nn.Parameter(torch.tensor(_log_of(self._temperature)))

    @property
    def temperature(self) -> float | Tensor:
        """τ; a tensor without gradient if it is learned. Assigning to it sets the learned value."""
        learned = self.log_temperature
        return self._temperature if learned is None else learned.detach().clamp(min=LOWEST).exp()

    @temperature.setter
    def temperature(self, value: float) -> None:
        if not value > 0:
            raise InputError(f"temperature must be positive, got {value}")
        self._temperature = value
        if self.log_temperature is not None:
            with torch.no_grad():
                self.log_temperature.fill_(_log_of(value))

    def _apply(self, fn: Callable, recurse: bool = True) -> "SupConLoss":
        learned = self.log_temperature

        def unrounded(x: Tensor) -> Tensor:
            y = fn(x)
            own = learned is not None and (x is learned or x is learned.grad)
            return x.to(y.device, torch.float32) if own and y.is_floating_point() and y.dtype.itemsize < 4 else y

        super()._apply(unrounded, recurse)
        return self

    def bounded(self, log_temperature: Tensor) -> Tensor:
        return _Bounded.apply(log_temperature)

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        learned = self.log_temperature
        logits = S / (self._temperature if learned is None else self.bounded(learned).exp())
        mean = (logits * positive).sum(1) / positive.sum(1).clamp(min=1)
        return torch.where(positive.any(1), masked_lse(logits, positive | negative) - mean, 0)

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        return Terms(logit=s / self.temperature, slope=1 / self.temperature)

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        logit = s / self.temperature
        return Terms(value=logit, weight=1 / self.temperature, logit=logit, slope=1 / self.temperature)

    def combine(self, p: Side, n: Side) -> Combined:
        active = p.count > 0
        share = p.share
        everything = torch.logaddexp(p.lse, n.lse)
        return Combined(
            torch.where(active, everything - share * p.value, 0),
            positive_sum=share,
            positive_lse=torch.where(active, -(p.lse - everything).exp(), 0),
            negative_lse=torch.where(active, (n.lse - everything).exp(), 0),
            active=active,
        )


def _log_of(temperature: float) -> float:
    if not temperature >= 0.01:
        raise InputError(f"a learned temperature must be at least 0.01, got {temperature}")
    return math.log(temperature)


class _Bounded(torch.autograd.Function):
    """max(x, LOWEST). Below the bound only a gradient that leads back passes, so that x neither drifts away nor is stuck."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=LOWEST)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where((x >= LOWEST) | (upstream < 0), upstream, 0)
