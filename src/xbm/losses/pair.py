"""What all pair-weighted losses share: the call, its one autograd node, and the weights of the GPW framework (Eq. 1)."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xbm.engine import dense, streaming
from xbm.engine.graph_node import new_handle, one_pass_node
from xbm.engine.pairing import EXCLUDES, Pairing, pair
from xbm.engine.terms import Combined, Expand, Result, Side, Terms
from xbm.errors import InputError, unknown
from xbm.kernels import HAS_TRITON, INTERPRETED, has_kernels
from xbm.memory import CrossBatchMemory

REDUCTIONS = ("sum", "mean", "balanced")
ENGINES = ("auto", "reference", "streaming", "triton")
CHOICES = {"reduction": REDUCTIONS, "engine": ENGINES, "exclude": (None, *EXCLUDES)}


class PairLoss(nn.Module):
    """A loss of the form L = 1/m Σ_i loss(P_i, N_i) over the positives and negatives of each anchor.

    A subclass states its formula twice: `dense` is the plain formula, which autograd differentiates (the reference), and
    `floor`, `negative`, `positive` and `combine` are its one-pass form (see `xbm.engine.terms`), from which the engines compute
    value and gradient together.

    Args:
        reduction: "sum": as in the paper. "mean": averages each anchor's pairs. "balanced": like "sum", but the negatives are
            scaled down so that their total weight does not exceed that of the positives.
        engine: "auto", "reference", "streaming" or "triton".
        exclude: which rows are the anchor itself. "instance": every row with the anchor's id (requires ids, and is the default
            if they are given). "copy": only the newest row of the anchor's image; older ones count as positives.
    """

    name: ClassVar[str]
    hyperparameters: ClassVar[Mapping[str, type]] = {}  # by name: float or bool
    ranks_positives: ClassVar[bool] = False
    one_reduction: ClassVar[bool] = False  # whether all reductions give the same loss
    ignores_extremes: ClassVar[bool] = False  # whether `negative` uses no extremes; holds for the class that states this
    kernel: ClassVar[str | None] = None  # the Triton kernel that implements the formulas of the class that states this

    def __init__(self, reduction: str = "sum", engine: str = "auto", exclude: str | None = None) -> None:
        super().__init__()
        self.reduction, self.engine, self.exclude = reduction, engine, exclude
        self.handle = new_handle(self)

    # ---------------------------------------------------------------- the formula, stated by each loss

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(m,): the loss of each anchor from the similarity matrix S (m, M) and the masks of its pairs."""
        raise NotImplementedError

    def floor(self, p: Side) -> Tensor | float:
        """The similarity above which a negative is valid."""
        return -torch.inf

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        """What valid negatives contribute, given the extremes (and ranks) of the positives."""
        raise NotImplementedError

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        """What positives contribute, given the complete negative side."""
        raise NotImplementedError

    def combine(self, p: Side, n: Side) -> Combined:
        """The loss of each anchor and the coefficients of its gradient sums; by default the two sides are added."""
        if self.reduction == "sum":
            return Combined(p.value + n.value, positive_sum=1.0, negative_sum=1.0)
        if self.reduction == "balanced":
            share = balance(p.weight, n.weight)
            return Combined(p.value + share * n.value, positive_sum=1.0, negative_sum=share)
        return Combined(p.share * p.value + n.share * n.value, positive_sum=p.share, negative_sum=n.share)

    # ---------------------------------------------------------------- what users call

    def forward(
        self,
        anchors: Tensor,
        labels: Tensor,
        memory: CrossBatchMemory | None = None,
        *,
        ids: Tensor | None = None,
        exclude: str | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, "PairStats"]:
        """The loss of the anchors against the memory's rows or, without a memory, against each other.

        Args:
            anchors: (m, D), unit rows.
            labels: (m,), integers.
            memory: the rows to compare with.
            ids: (m,), the instance (for example the image) that each anchor comes from.
            exclude: overrides the loss's own `exclude`.
            return_stats: whether to return the statistics of the pairs too.

        Raises:
            InputError: if an argument is invalid.
        """
        engine = self._choose_engine(anchors, anchors if memory is None else memory.rows)
        pairing = pair(anchors, labels, memory, ids, exclude or self.exclude, inspect=engine in (dense, streaming))
        if len(pairing.labels) == 0:
            counts, extremes = pairing.labels.new_zeros(2, 0), anchors.new_zeros(3, 0)
            parts: tuple[Tensor, ...] = (anchors.sum() * 0, *counts, *extremes, counts.sum())
        elif engine is dense:
            parts = dense.reference(self, anchors, pairing, return_stats)
        else:
            # in a batch, the kernels add the gradients of the anchors' two roles; elsewhere autograd does
            rows = None if pairing.in_batch and engine is not streaming else pairing.rows
            grad = torch.is_grad_enabled()
            wanted = (grad and anchors.requires_grad, grad and rows is not None and rows.requires_grad)
            if torch.compiler.is_compiling():
                value, _, _, *statistics = one_pass_node(
                    self, anchors, rows, pairing, engine is not streaming, *wanted, return_stats
                )
                parts = (value, *statistics)
            else:
                parts = OnePass.apply(anchors, rows, pairing, self, engine, wanted, return_stats)
        if not return_stats:
            return parts[0]
        loss, positives, negatives, hardest, easiest_positive, hardest_positive, *unsound = parts
        skipped = unsound[0] if pairing.sound is None else (~pairing.sound).sum()
        return loss, PairStats(positives, negatives, hardest, easiest_positive, hardest_positive, skipped)

    def with_gradient(
        self, anchors: Tensor, labels: Tensor, memory: CrossBatchMemory | None = None, *,
        ids: Tensor | None = None, exclude: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The loss and its gradient with respect to the anchors, as plain tensors: continue with `anchors.backward(gradient)`.

        This equals calling the loss and then `loss.backward()`, without the CPU overhead of autograd, which exceeds the time of
        the kernels on a GPU.

        Example:
            >>> from xbm import ContrastiveLoss
            >>> anchors = torch.eye(4)[[0, 0, 1, 2]].requires_grad_()
            >>> loss, gradient = ContrastiveLoss().with_gradient(anchors, torch.tensor([0, 0, 1, 1]))
            >>> anchors.backward(gradient)
            >>> loss.item(), torch.equal(anchors.grad, gradient)
            (0.5, True)

        Raises:
            InputError: if an argument is invalid, or if the memory's rows have a gradient of their own.
        """
        if memory is not None and memory.rows.requires_grad:
            raise InputError(
                f"with_gradient does not support update={memory.update!r}, whose rows need a gradient too: use backward()"
            )
        self.refuse_parameters()
        leaf = anchors.detach()
        engine = self._choose_engine(leaf, leaf if memory is None else memory.rows)
        if engine is dense or len(leaf) == 0:
            with torch.enable_grad():
                value = self(leaf.requires_grad_(), labels, memory, ids=ids, exclude=exclude)
                return value.detach(), *torch.autograd.grad(value, leaf)
        pairing = pair(leaf, labels, memory, ids, exclude or self.exclude, inspect=engine in (dense, streaming))
        kernels = engine is not streaming
        both = pairing.in_batch and not kernels  # the kernels add the gradients of the anchors' two roles themselves
        with torch.no_grad():
            if torch.compiler.is_compiling():
                rows = None if pairing.in_batch and kernels else pairing.rows
                value, gradient, of_rows, *_ = one_pass_node(self, leaf, rows, pairing, kernels, True, both, False)
            else:
                value, gradient, of_rows, *_ = engine.compare(self, leaf, pairing, True, both, False)
            return value, (gradient + of_rows if both else gradient).to(leaf.dtype)

    def weights(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The paper's w_ij: m·∂L/∂S_ij for negatives, −m·∂L/∂S_ij for positives, 0 elsewhere.

        Example:
            >>> from xbm import ContrastiveLoss
            >>> S = torch.tensor([[0.9, 0.6, 0.4]])
            >>> positive = torch.tensor([[True, False, False]])
            >>> ContrastiveLoss().weights(S, positive, ~positive).tolist()
            [[1.0, 1.0, 0.0]]
        """
        return dense.weights(self, S, positive, negative)

    def extra_repr(self) -> str:
        shown = {key: getattr(self, key) for key in (*self.hyperparameters, "reduction", "engine")}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())

    # ---------------------------------------------------------------- how a call is carried out

    def _choose_engine(self, anchors: Tensor, rows: Tensor) -> ModuleType:
        """The module that runs: on a GPU the kernels, if there is one for this loss; otherwise the streaming engine.

        `streaming` and `triton` both have `compare(loss, anchors, pairing, gradient, row_gradient, stats) -> Result`.
        """
        if self.engine == "reference":
            return dense
        self.refuse_parameters()
        if self.engine == "triton" or (self.engine == "auto" and getattr(anchors, "is_cuda", False)):
            if has_kernels(anchors.device) or (self.engine == "triton" and HAS_TRITON and INTERPRETED):
                from xbm.engine import triton

                if triton.supports(self, anchors, rows):
                    return triton
            elif self.engine == "triton":
                raise InputError('engine="triton" requires an NVIDIA GPU of compute capability 8.0 or later: use engine="auto"')
        return streaming

    def refuse_parameters(self) -> None:
        """Raises if a subclass has parameters to train, which only autograd on the reference engine differentiates."""
        if self._parameters or self._modules:
            trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
            if trained:
                raise InputError(
                    f"{type(self).__name__} has parameters ({', '.join(trained)}) that only a call of the loss with "
                    'engine="reference" differentiates'
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).hyperparameters:
            value = _plain(name, value, type(self).hyperparameters[name])
        elif name in CHOICES and value not in CHOICES[name]:
            raise unknown(name, value, [choice for choice in CHOICES[name] if choice is not None])
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = new_handle(self)  # a copy is a loss of its own

    def _replicate_for_data_parallel(self) -> "PairLoss":
        replica = super()._replicate_for_data_parallel()
        replica.handle = new_handle(replica)
        return replica


def _plain(name: str, value: Any, kind: type) -> float | bool:
    """The value of a hyper-parameter as a plain number: engines and kernels compute with nothing else."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.numel() != 1:
            raise InputError(f"{name} must be a plain number, got a tensor that is trained or has several elements")
        value = value.item()
    if kind is bool:
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        raise InputError(f"{name} must be True or False, got {value!r}")
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value!r}")
    return float(value)


class OnePass(torch.autograd.Function):
    """A one-pass engine as an autograd node: the gradients are computed with the value."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        rows: Tensor | None,
        pairing: Pairing,
        loss: PairLoss,
        engine: Any,
        wanted: tuple[bool, bool],
        stats: bool,
    ) -> tuple[Tensor, ...]:
        result: Result = engine.compare(loss, anchors, pairing, *wanted, stats)
        # neither inputs nor outputs, so they need not be saved the slow way
        # contiguous, because sums over another layout, later in the backward pass, differ in their last bit
        ctx.gradients = (
            result.gradient.contiguous(),
            None if result.row_gradient is None else result.row_gradient.to(pairing.rows.dtype),
        )
        ctx.types = anchors.dtype, pairing.rows.dtype
        if not stats:
            return (result.loss,)
        ctx.set_materialize_grads(False)
        extra = (*result.statistics, *(() if result.unsound is None else (result.unsound,)))
        ctx.mark_non_differentiable(*extra)
        return result.loss, *extra

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
        gradients = [
            # half precision could not represent a large loss scale, so the product is computed in at least float32
            (gradient.to(torch.promote_types(dtype, torch.float32)) * upstream).to(dtype)
            if needed and gradient is not None
            else None
            for gradient, dtype, needed in zip(ctx.gradients, ctx.types, ctx.needs_input_grad)
        ]
        return (*gradients, *[None] * 5)


@dataclass
class PairStats:
    """Statistics of each anchor's pairs, as device tensors of shape (m,); also by name: `stats["valid_negatives"]`."""

    valid_positives: Tensor
    valid_negatives: Tensor
    hardest_negative: Tensor  # largest similarity among the negatives, -inf if there are none
    easiest_positive: Tensor  # largest similarity among the positives, -inf if there are none
    hardest_positive: Tensor  # smallest similarity among the positives, +inf if there are none
    unsound: Tensor  # (), anchors that were skipped

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)

    def read(self) -> dict[str, Tensor]:
        """Copies the statistics to the host.

        Raises:
            InputError: if an anchor was unsound on a device where the call could not raise; it contributed nothing.
        """
        if bad := int(self.unsound):
            raise InputError(
                f"{bad} anchors were skipped because they are not finite, are not of unit length, have a negative id, or "
                "(without ids) are not the rows enqueued last"
            )
        return {field.name: getattr(self, field.name).cpu() for field in fields(self) if field.name != "unsound"}


# ------------------------------------------------------------------ arithmetic that several losses use


def balance(pull: Tensor, push: Tensor) -> Tensor:
    """(m,): the factor for an anchor's negatives with which their weights add up to at most its positives'.

    An anchor without positives counts as one with a single pair of weight 1, so its negatives still contribute.
    """
    return (pull.clamp(min=1) / push.clamp(min=1)).clamp(max=1)


def masked_lse(logits: Tensor, mask: Tensor) -> Tensor:
    """log Σ e^logit over the marked entries of each row, -inf (and no gradient) where there are none."""
    some = mask.any(1)
    return torch.where(some, logits.where(mask | ~some[:, None], -torch.inf).logsumexp(1), -torch.inf)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact everywhere: torch's own is linear from 20 on."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))
