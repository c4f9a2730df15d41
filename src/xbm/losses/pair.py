"""What all pair-weighted losses share: the call, its one autograd node, and the weights of the GPW framework (Eq. 1)."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xbm.checks import check_memory, plain_number
from xbm.engine import dense, new_handle, one_pass_node, streaming, temperature_gradient
from xbm.engine.pairing import EXCLUDES, Pairing, among, check_references, pair
from xbm.engine.terms import Combined, Expand, PairStats, Result, Side, Terms, balance
from xbm.errors import InputError, unknown
from xbm.kernels import HAS_TRITON, INTERPRETED, has_kernels, lacks
from xbm.memory import CrossBatchMemory

REDUCTIONS = ("sum", "mean", "balanced")
ENGINES = ("auto", "reference", "streaming", "triton")
UNSTATED = "the loss must state `dense`, `negative` and `positive`"  # on every engine: statistics use the latter two
CHOICES = {"reduction": REDUCTIONS, "engine": ENGINES, "exclude": (None, *EXCLUDES)}
PATIENCE = 8  # calls in a row without a positive, before a warning


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
            if they are given). "copy": only the newest row of the anchor's image; older ones count as positives. "none": no
            row, the default with references.
    """

    name: ClassVar[str]
    hyperparameters: ClassVar[Mapping[str, type]] = {}  # by name: float or bool
    ranks_positives: ClassVar[bool] = False
    one_reduction: ClassVar[bool] = False  # whether all reductions give the same loss
    ignores_extremes: ClassVar[bool] = False  # whether `negative` uses no extremes; holds for the class that states this
    log_temperature: nn.Parameter | None  # learned by a loss of S/τ
    kernel: ClassVar[str | None] = None  # the Triton kernel that implements the formulas of the class that states this

    def __init__(self, reduction: str = "sum", engine: str = "auto", exclude: str | None = None) -> None:
        super().__init__()
        self.reduction, self.engine, self.exclude = reduction, engine, exclude
        self.handle = new_handle(self)
        self.missing_positives = MissingPositives()
        self.register_parameter("log_temperature", None)

    # ---------------------------------------------------------------- the formula, stated by each loss

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(m,): the loss of each anchor from the similarity matrix S (m, M) and the masks of its pairs."""
        raise NotImplementedError(f"{type(self).__name__}: {UNSTATED}")

    def floor(self, p: Side) -> Tensor | float:
        """The similarity above which a negative is valid."""
        return -torch.inf

    def negative(self, s: Tensor, p: Side, expand: Expand) -> Terms:
        """What valid negatives contribute, given the extremes (and ranks) of the positives."""
        raise NotImplementedError(f"{type(self).__name__}: {UNSTATED}")

    def positive(self, s: Tensor, n: Side, expand: Expand) -> Terms:
        """What positives contribute, given the complete negative side."""
        raise NotImplementedError(f"{type(self).__name__}: {UNSTATED}")

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
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        reference_ids: Tensor | None = None,
        exclude: str | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, PairStats]:
        """The loss of the anchors against the references and the memory's rows or, without either, against each other.

        With references and a memory, a memory row that is also a reference counts once: with ids, every row whose id is among
        `reference_ids` is left out; without ids, the rows of the latest enqueue are, if they equal the references. The keys of
        a `MomentumEncoder` do not equal them: with such keys, pass ids, or the batch counts twice.

        Queries against documents only are one such call: pass the queries as anchors, the documents as references and a memory
        of documents. `TwoTowerLoss` makes this call in both directions.

        Args:
            anchors: (m, D), unit rows.
            labels: (m,), integers.
            memory: the rows to compare with.
            ids: (m,), the instance (for example the image) that each anchor comes from.
            references: (r, D), unit rows: live rows on the other side, such as the documents of a batch of queries. They get
                a gradient too; to train them against a memory, see `xbm.two_tower_loss.against_memory`. With mined negatives
                among them (`torch.cat([documents, negatives])`) and a memory, pass ids, or the batch counts twice.
            reference_labels: (r,); by default those of the anchors.
            reference_ids: (r,); by default those of the anchors.
            exclude: overrides the loss's own `exclude`.
            return_stats: whether to return the statistics of the pairs too.

        Raises:
            InputError: if an argument is invalid.

        Example:
            >>> from xbm import SupConLoss
            >>> queries, documents = torch.eye(3, 4), torch.eye(3, 4).roll(1, 0).requires_grad_()
            >>> loss = SupConLoss(temperature=1.0)(queries, torch.arange(3), references=documents)
            >>> logits = queries @ documents.T
            >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, torch.arange(3)))
            True
        """
        if memory is not None and not isinstance(memory, CrossBatchMemory):
            check_memory(memory)
        engine = self._choose_engine(anchors, memory, references)
        other = check_references(anchors, labels, ids, references, reference_labels, reference_ids)
        exclude = self.exclude if exclude is None else exclude
        pairing = pair(anchors, labels, memory, ids, exclude, engine in (dense, streaming), other)
        if len(pairing.labels) == 0:
            counts, extremes = pairing.labels.new_zeros(2, 0), anchors.new_zeros(3, 0)
            nothing = [leaf.sum() * 0 for leaf in (anchors, references, self.log_temperature) if leaf is not None]
            parts: tuple[Tensor, ...] = (torch.stack(nothing).sum(), *counts, *extremes, counts.sum())
        elif engine is dense:
            parts = dense.reference(self, anchors, pairing, True)
            self.missing_positives.look(pairing, parts[4])
        else:
            # in a batch, the kernels add the gradients of the anchors' two roles; elsewhere autograd does
            rows = None if pairing.in_batch and engine is not streaming else pairing.rows
            learned = None if self.log_temperature is None else self.bounded(self.log_temperature)
            leaves = (anchors, rows, pairing.references, learned)
            grad = torch.is_grad_enabled()
            wanted = [grad and leaf is not None and leaf.requires_grad for leaf in leaves]
            if torch.compiler.is_compiling():
                value, _, _, _, _, *statistics = one_pass_node(
                    self, leaves, pairing, engine is not streaming, wanted, return_stats
                )
                parts = (value, *statistics)
            else:
                parts = OnePass.apply(*leaves, pairing, self, engine, wanted, return_stats)
        if not return_stats:
            return parts[0]
        loss, positives, negatives, hardest, easiest_positive, hardest_positive, *unsound = parts
        skipped = unsound[0] if pairing.sound is None else (~pairing.sound).sum()
        if references is not None:
            skipped = skipped + (pairing.stamps[: len(references)] < 0).sum()
        return loss, PairStats(positives, negatives, hardest, easiest_positive, hardest_positive, skipped)

    def with_gradient(
        self, anchors: Tensor, labels: Tensor, memory: CrossBatchMemory | None = None, *,
        ids: Tensor | None = None, references: Tensor | None = None, reference_labels: Tensor | None = None,
        reference_ids: Tensor | None = None, exclude: str | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The loss and its gradient with respect to the anchors, as plain tensors: continue with `anchors.backward(gradient)`.

        With references, their gradient is the third value. This equals calling the loss and then `loss.backward()`, without
        the CPU overhead of autograd, which exceeds the time of the kernels on a GPU.

        Example:
            >>> from xbm import ContrastiveLoss
            >>> anchors = torch.eye(4)[[0, 0, 1, 2]].requires_grad_()
            >>> loss, gradient = ContrastiveLoss().with_gradient(anchors, torch.tensor([0, 0, 1, 1]))
            >>> anchors.backward(gradient)
            >>> loss.item(), torch.equal(anchors.grad, gradient)
            (0.5, True)

        Raises:
            InputError: if an argument is invalid, or if the memory's rows or a learned temperature need a gradient too.
        """
        check_memory(memory)
        if memory is not None and memory.rows.requires_grad:
            raise InputError(
                f"with_gradient does not support update={memory.update!r}, whose rows need a gradient too: use backward()"
            )
        self.refuse_parameters()
        if self.log_temperature is not None and self.log_temperature.requires_grad:
            raise InputError("with_gradient does not return the gradient of a learned temperature: use backward()")
        leaf, live = anchors.detach(), None if references is None else references.detach()
        engine = self._choose_engine(leaf, memory, live)
        if engine is dense or len(leaf) == 0:
            with torch.enable_grad():
                inputs = [x.requires_grad_() for x in (leaf, live) if x is not None]
                value = self(
                    leaf, labels, memory, ids=ids, references=live, reference_labels=reference_labels,
                    reference_ids=reference_ids, exclude=exclude,
                )  # fmt: skip
                return value.detach(), *torch.autograd.grad(value, inputs)
        other = check_references(leaf, labels, ids, live, reference_labels, reference_ids)
        exclude = self.exclude if exclude is None else exclude
        pairing = pair(leaf, labels, memory, ids, exclude, engine is streaming, other)
        kernels, twice = engine is not streaming, pairing.references is not None
        both = pairing.in_batch and not kernels  # the kernels add the gradients of the anchors' two roles themselves
        of_rows = both or (live is not None and not twice)
        with torch.no_grad():
            if torch.compiler.is_compiling():
                rows = None if pairing.in_batch and kernels else pairing.rows
                leaves = (leaf, rows, pairing.references, None)
                value, *gradients = one_pass_node(self, leaves, pairing, kernels, (True, of_rows, twice, False), False)[:4]
            else:
                watch = self.missing_positives
                result = engine.compare(
                    self, leaf, pairing, True, of_rows, leaf.is_cuda and watch.due(), reference_gradient=twice
                )
                watch.look(pairing, result.easiest_positive)
                value, gradients = result.loss, [result.gradient, result.row_gradient, result.reference_gradient]
            if both:
                return value, (gradients[0] + gradients[1]).to(leaf.dtype)
            if live is None:
                return value, gradients[0].to(leaf.dtype)
            return value, gradients[0].to(leaf.dtype), gradients[2 if twice else 1].to(live.dtype)

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

    def bounded(self, log_temperature: Tensor) -> Tensor:
        """A learned log τ within its bounds. The engines return its gradient for a loss that depends on S/τ only."""
        return log_temperature

    def _choose_engine(self, anchors: Tensor, memory: CrossBatchMemory | None, references: Tensor | None) -> ModuleType:
        """The module that runs: on a GPU the kernels, if the loss has one that was checked there; otherwise streaming.

        `streaming` and `triton` both have `compare(loss, anchors, pairing, gradient, row_gradient, stats) -> Result`.
        """
        if self.engine == "reference":
            return dense
        self.refuse_parameters()
        if self.engine == "triton" or (self.engine == "auto" and getattr(anchors, "is_cuda", False)):
            if has_kernels(anchors.device) or (self.engine == "triton" and HAS_TRITON and INTERPRETED):
                from xbm.engine import triton

                checked = self.kernel in triton.CHECKED_ON_GPU or self.engine == "triton"
                if checked and triton.supports(self, anchors, None if memory is None else memory.rows, references):
                    return triton
            elif self.engine == "triton":
                raise InputError(f'engine="triton" needs {lacks(anchors.device)}: use engine="auto"')
        return streaming

    def refuse_parameters(self) -> None:
        """Raises if a subclass has parameters to train, which only autograd on the reference engine differentiates."""
        if len(self._parameters) > 1 or self._modules:
            named = self.named_parameters()
            trained = [name for name, parameter in named if parameter.requires_grad and name != "log_temperature"]
            if trained:
                raise InputError(
                    f"{type(self).__name__} has parameters ({', '.join(trained)}) that only a call of the loss with "
                    'engine="reference" differentiates'
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).hyperparameters:
            value = plain_number(name, value, type(self).hyperparameters[name])
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


class OnePass(torch.autograd.Function):
    """A one-pass engine as an autograd node: the gradients are computed with the value."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        rows: Tensor | None,
        references: Tensor | None,
        log_temperature: Tensor | None,
        pairing: Pairing,
        loss: PairLoss,
        engine: Any,
        wanted: Sequence[bool],
        stats: bool,
    ) -> tuple[Tensor, ...]:
        watch = loss.missing_positives
        result: Result = engine.compare(
            loss, anchors, pairing, *wanted[:2], stats or (anchors.is_cuda and watch.due()), reference_gradient=wanted[2]
        )
        watch.look(pairing, result.easiest_positive)
        # neither inputs nor outputs, so they need not be saved the slow way
        # contiguous, because sums over another layout, later in the backward pass, differ in their last bit
        ctx.gradients = (
            result.gradient.contiguous(),
            None if result.row_gradient is None else result.row_gradient.to(pairing.rows.dtype),
            None if result.reference_gradient is None or references is None else result.reference_gradient.to(references.dtype),
            temperature_gradient(anchors, result.gradient, rows is None and wanted[0]) if wanted[3] else None,
        )
        ctx.types = (
            anchors.dtype,
            pairing.rows.dtype,
            None if references is None else references.dtype,
            None if log_temperature is None else log_temperature.dtype,
        )
        if not stats:
            return (result.loss,)
        ctx.set_materialize_grads(False)
        extra = (*result.statistics, *(() if result.unsound is None else (result.unsound,)))
        ctx.mark_non_differentiable(*extra)
        return result.loss, *extra

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 9
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


# ------------------------------------------------------------------ a warning for losses that train on nothing


class MissingPositives:
    """Warns once if no anchor had a positive for several calls in a row, and says why.

    On a CPU every call counts. On a GPU, where it takes statistics, calls 1 to 8 and every 32nd do: they are counted on the
    device, and the count is read once it has arrived, without waiting for it. The state is not saved.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.in_a_row = 0
        self.warned = False
        self.on_device: Tensor | None = None  # (), the calls in a row, counted there
        self.arrived: tuple[Tensor, torch.cuda.Event] | None = None  # a copy on the host, and when it is complete

    def __reduce__(self) -> tuple:
        return MissingPositives, ()  # a copy of a loss starts to count anew

    def due(self) -> bool:
        """Whether this call is looked at on a GPU, where that takes statistics."""
        if self.warned or torch.cuda.is_current_stream_capturing():
            return False
        self.calls += 1
        return self.calls <= PATIENCE or self.calls % 32 == 0

    def look(self, pairing: Pairing, easiest: Tensor | None) -> None:
        """Counts a call, given the similarity of each anchor's easiest positive, -inf if it has none; None: not known."""
        if torch.compiler.is_compiling() or self.warned or easiest is None:
            return
        if easiest.device.type == "cpu":
            if float(easiest.amax()) > -torch.inf:
                self.in_a_row = 0
            else:
                self.in_a_row += 1
                self._warn_from(self.in_a_row, pairing)
        elif easiest.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._look_on_device(pairing, easiest)

    def _look_on_device(self, pairing: Pairing, easiest: Tensor) -> None:
        missing = easiest.amax() == -torch.inf
        before = 0 if self.on_device is None else self.on_device
        self.on_device = torch.where(missing, before + 1, 0)
        if self.arrived is None:
            copied = torch.empty((), dtype=self.on_device.dtype, pin_memory=True).copy_(self.on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.arrived = copied, event
        elif self.arrived[1].query():
            count, self.arrived = int(self.arrived[0]), None
            self._warn_from(count, pairing)

    def _warn_from(self, in_a_row: int, pairing: Pairing) -> None:
        if in_a_row < PATIENCE:
            return
        self.warned = True
        message = f"no anchor had a positive in the last {in_a_row} calls of the loss: {missing_because(pairing)}"
        warnings.warn(message, stacklevel=_level_of_the_caller())


def _level_of_the_caller() -> int:
    """How far up the stack, from the function that calls this, the code is that called the loss."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("xbm", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def missing_because(pairing: Pairing) -> str:
    """Why there are no positives."""
    if pairing.in_batch:
        repeated = len(pairing.labels.unique()) < len(pairing.labels)
    else:
        counts = pairing.stamps >= 0
        if not bool(counts.any()):
            return "the memory is empty. Call memory.enqueue(v.detach(), labels, ids) for every batch, before the loss"
        repeated = bool(among(pairing.row_labels[counts], pairing.labels).any())
    if repeated:
        return (
            "every row with an anchor's label also has its id and was excluded as the anchor itself. If both sides of a pair "
            'share an id, pass exclude="none"'
        )
    return (
        "no row has the label of an anchor. A pair loss needs labels that repeat: sample two or more images per class, or pass "
        "the other side of each pair as references"
    )
