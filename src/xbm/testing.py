"""Checks for a loss of your own: `check_loss` compares its one-pass form with its plain formula."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine import dense
from xbm.engine.pairing import pair
from xbm.errors import InputError
from xbm.losses import REDUCTIONS, PairLoss
from xbm.losses.pair import UNSTATED
from xbm.memory import CrossBatchMemory

__all__ = ["check_loss"]

DIM, SPREAD = 7, 0.7
FEW = 1000  # pairs up to which single pairs are compared
CLOSE = 1e-9  # of the largest number that is compared: the two forms differ by rounding only
STEP, STEEP = 1e-6, 1e-5  # of finite differences: the step, and how close they come to a derivative


class Case(NamedTuple):
    """Anchors and what they are compared with; all in float64."""

    name: str
    anchors: Tensor  # (m, D)
    labels: Tensor  # (m,)
    memory: CrossBatchMemory | None = None
    ids: Tensor | None = None
    exclude: str | None = None


def check_loss(loss: PairLoss, reductions: Iterable[str] = REDUCTIONS, finite_differences: bool = True) -> None:
    """Checks that the one-pass form of a loss (`floor`, `negative`, `positive`, `combine`) computes what `dense` states.

    On small and large problems, with and without a memory, and where anchors have no positives, no negatives or older copies,
    it compares in float64: the loss of each anchor, the weight of each pair, and the gradients of the streaming engine in the
    anchors and in the memory's rows, with `dense` and its derivatives by autograd. It needs no test framework.

    Args:
        loss: the loss, with the hyper-parameters to check. It is not changed.
        reductions: those that the loss's `dense` computes.
        finite_differences: whether the derivatives of `dense` by autograd must equal its finite differences. Pass False for a
            loss that treats a part of its formula as a constant, as the circle loss does. They are not compared for the
            reduction "balanced", which does so in every loss.

    Raises:
        AssertionError: one sentence that names the case, the quantity, and the expected and the actual value.
        InputError: if the loss has parameters to train, which have no one-pass form, or is a class instead of an instance.

    Example:
        >>> from xbm.losses import PairLoss, Terms
        >>> class SquaredLoss(PairLoss):  # L_i = Σ_P (1 − S) + Σ_N [S]₊²
        ...     def dense(self, S, positive, negative):  # the plain formula
        ...         return ((1 - S) * positive).sum(1) + (S.relu() ** 2 * negative).sum(1)
        ...     def floor(self, p):  # the similarity above which a negative counts
        ...         return 0.0
        ...     def negative(self, s, p, expand):  # what a negative adds, and the absolute value of its derivative
        ...         return Terms(value=s**2, weight=2 * s)
        ...     def positive(self, s, n, expand):
        ...         return Terms(value=1 - s, weight=1.0)
        >>> check_loss(SquaredLoss(), reductions=["sum"])
        >>> class Wrong(SquaredLoss):
        ...     def negative(self, s, p, expand):
        ...         return Terms(value=s**2, weight=s)
        >>> check_loss(Wrong(), reductions=["sum"])
        Traceback (most recent call last):
        AssertionError: Wrong(reduction='sum'), some anchors against some rows: the weight of a negative of anchor ...
    """
    if not isinstance(loss, PairLoss):
        name = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        hint = f": pass an instance, {name}()" if isinstance(loss, type) and issubclass(loss, PairLoss) else ""
        raise InputError(f"loss must be a PairLoss, got {'the class ' if isinstance(loss, type) else ''}{name}{hint}")
    passed: list[str] = []
    for reduction in reductions:
        try:
            _check_reduction(loss, reduction, finite_differences)
        except AssertionError as error:
            if not passed or reductions is not REDUCTIONS:
                raise
            hint = f"if `dense` does not compute this reduction, pass reductions={passed}"
            raise AssertionError(f"{error}; {hint}") from error
        passed.append(reduction)


def _check_reduction(loss: PairLoss, reduction: str, finite_differences: bool) -> None:
    mine = copy.deepcopy(loss).double()
    mine.reduction = reduction
    mine.refuse_parameters()
    for case in cases():
        who = f"{type(loss).__name__}(reduction={reduction!r}), {case.name}"
        pairs = len(case.anchors) * len(case.anchors if case.memory is None else case.memory.rows)
        if pairs <= FEW:
            _check_pairs(mine, case, who)
            if finite_differences and reduction != "balanced":
                _check_differences(mine, case, who)
        _check_engine(mine, case, who)


def cases() -> Iterator[Case]:
    """What a loss has to cope with, the plainest case first."""
    torch_state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        built = [*_against_a_memory(), *_within_a_batch(), *_large()]
    finally:
        torch.set_rng_state(torch_state)
    yield from built


# ------------------------------------------------------------------ the problems


def _rows(labels: Tensor, dim: int = DIM) -> Tensor:
    """Unit rows that gather by class, loosely: some negatives are nearer than some positives."""
    centres = torch.randn(int(labels.max()) + 1 if len(labels) else 1, dim, dtype=torch.float64)
    centres[:5] = torch.randn(5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[: len(centres)]
    return F.normalize(centres[labels] + SPREAD * torch.randn(len(labels), dim, dtype=torch.float64))


def _memory(labels: Tensor, ids: Tensor, update: str = "queue", free: int = 6, dim: int = DIM) -> CrossBatchMemory:
    memory = CrossBatchMemory(len(labels) + free, dim, update, dtype=torch.float64)
    memory.enqueue(_rows(labels, dim), labels, ids)
    return memory


def _against_a_memory() -> Iterator[Case]:
    labels, row_labels = torch.tensor([0, 1, 2, 0, 1]), torch.arange(23) % 4
    ids, row_ids = torch.arange(100, 105), torch.arange(23)
    yield Case("some anchors against some rows", _rows(labels), labels, _memory(row_labels, row_ids), ids)
    alone = torch.tensor([0, 7, 1])
    yield Case("an anchor without positives", _rows(alone), alone, _memory(row_labels, row_ids), ids[:3])
    mine = torch.where(row_labels == 0, row_ids, 100)  # all that is not of class 0 is of anchor 0's own image
    yield Case("an anchor without negatives", _rows(labels), labels, _memory(row_labels, mine), ids)
    yield Case("no positives at all", _rows(labels + 4), labels + 4, _memory(row_labels, row_ids), ids)
    yield Case("no negatives at all", _rows(labels * 0), labels * 0, _memory(row_labels * 0, row_ids), ids)
    none = row_labels[:0]
    yield Case("an empty memory", _rows(labels), labels, _memory(none, none), ids)
    yield Case("one anchor against one row of its class", _rows(labels[:1]), labels[:1], _memory(labels[:1], ids[1:2]), ids[:1])
    yield Case("one anchor against one other row", _rows(labels[:1]), labels[:1], _memory(labels[1:2], ids[1:2]), ids[:1])
    copies = row_ids // 3  # each image three times, under several labels
    for exclude in ("instance", "copy"):
        memory = _memory(row_labels, copies)
        yield Case(f"older copies of the anchors, exclude={exclude!r}", _rows(labels), labels, memory, torch.arange(5), exclude)
    memory = _memory(row_labels, row_ids, "backprop")
    yield Case("rows with a gradient of their own", _rows(labels), labels, memory, torch.arange(5) * 4)


def _within_a_batch() -> Iterator[Case]:
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 0])
    yield Case("a batch", _rows(labels), labels)
    yield Case("a batch with two views of an image", _rows(labels), labels, ids=torch.tensor([5, 5, 6, 7, 7, 8, 9]))
    yield Case("a batch of one class", _rows(labels * 0), labels * 0)
    yield Case("a batch in which all classes differ", _rows(torch.arange(6)), torch.arange(6))
    yield Case("a batch of one", _rows(labels[:1]), labels[:1])


def _large() -> Iterator[Case]:
    """So many pairs that the engine goes through them in tiles: with few or many positives, few or many valid negatives."""
    labels, ids = torch.arange(9) % 4, torch.arange(9)
    for name, classes, dim, update in (
        ("many rows, few of them near", 60, 48, "backprop"),
        ("many rows, many of them near", 60, 4, "queue"),
        ("many rows of two classes", 2, 5, "backprop"),
    ):
        memory = _memory(torch.arange(2000) % classes, torch.arange(2000), update, dim=dim)
        yield Case(name, _rows(labels, dim), labels, memory, ids)
    labels = torch.arange(131) % 40
    yield Case("a large batch", _rows(labels), labels)


# ------------------------------------------------------------------ the comparisons


def _similarities(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(m, M): S, and the masks of the positives and negatives."""
    pairing = pair(case.anchors, case.labels, case.memory, case.ids, case.exclude)
    positive, negative = (mask.T for mask in pairing.masks())
    return case.anchors @ pairing.rows.detach().T, positive, negative


def _check_pairs(loss: PairLoss, case: Case, who: str) -> None:
    """The loss of each anchor and the weight of each pair."""
    S, positive, negative = _similarities(case)
    with _explained(who, "`dense`"):
        S.requires_grad_()
        expected = loss.dense(S, positive, negative)
    if expected.shape != (len(S),):
        shape = tuple(expected.shape)
        raise AssertionError(f"{who}: `dense` returned shape {shape}, expected one loss per anchor, ({len(S)},)")
    slopes, expected, S = _gradient(expected, S), expected.detach(), S.detach()
    with torch.no_grad(), _explained(who, "`floor`, `negative`, `positive` or `combine`"):
        actual = dense.whole(loss, S.T, positive.T, negative.T).combined.loss
        weights = loss.weights(S, positive, negative)
    for mask, sign, kind, names in (
        (negative, 1, "a negative", "`floor`, `negative` and `combine`"),
        (positive, -1, "a positive", "`positive` and `combine`"),
    ):
        wanted = torch.where(mask, sign * slopes, 0) + 0.0  # no -0 in a sentence
        if (place := _differs(weights * mask, wanted)) is not None:
            i, j = place
            raise AssertionError(
                f"{who}: the weight of {kind} of anchor {i} at S = {_shown(S[i, j])} is {_shown(weights[i, j])}, expected "
                f"{_shown(wanted[i, j])}, the derivative of `dense`: check {names}"
            )
    if (place := _differs(actual, expected)) is not None:
        raise AssertionError(
            f"{who}: the loss of anchor {place[0]} is {_shown(actual[place])}, expected {_shown(expected[place])}, the "
            "value of `dense`: check the values of `negative` and `positive`, and `combine`"
        )


def _check_differences(loss: PairLoss, case: Case, who: str) -> None:
    """The derivatives of `dense` by autograd against its finite differences."""
    S, positive, negative = _similarities(case)
    slopes, S = _gradient(loss.dense(S.requires_grad_(), positive, negative), S), S.detach()
    numeric = torch.zeros_like(slopes)
    with torch.no_grad():
        for j in range(S.shape[1]):  # a row meets every anchor once, and anchors do not depend on each other
            shift = torch.zeros_like(S)
            shift[:, j] = STEP
            up, down = (loss.dense(S + sign * shift, positive, negative) for sign in (1, -1))
            numeric[:, j] = (up - down) / (2 * STEP)
    if (place := _differs(slopes, numeric, STEEP)) is not None:
        i, j = place
        raise AssertionError(
            f"{who}: the derivative of `dense` for anchor {i} at S = {_shown(S[i, j])} is {_shown(slopes[i, j])} by autograd, "
            f"expected {_shown(numeric[i, j])}, its finite difference: check `dense` for a detached part, or pass "
            "finite_differences=False if it is meant to be constant"
        )


def _check_engine(loss: PairLoss, case: Case, who: str) -> None:
    """Value and gradients of the streaming engine against those of the reference."""
    results = []
    for engine in ("reference", "streaming"):
        anchors, memory = case.anchors.clone().requires_grad_(), copy.deepcopy(case.memory)
        loss.engine = engine
        with _explained(who, f"engine={engine!r}"):
            value = loss(anchors, case.labels, memory, ids=case.ids, exclude=case.exclude)
            assert isinstance(value, Tensor)
            value.backward()
        rows = None if memory is None else memory.rows.grad
        results.append({"the loss": value.detach(), "the gradient of anchor": anchors.grad, "the gradient of row": rows})
    reference, streaming = results
    for name, expected in reference.items():
        if expected is None:
            continue
        actual = torch.zeros_like(expected) if (given := streaming[name]) is None else given
        if (place := _differs(actual, expected)) is None:
            continue
        where = f" {place[0]} in dimension {place[1]}" if place else ""
        raise AssertionError(
            f"{who}: {name}{where} is {_shown(actual[place])} with engine='streaming', expected {_shown(expected[place])} "
            "as with engine='reference': check the use of `expand` in `negative` and `positive`"
        )


def _gradient(losses: Tensor, S: Tensor) -> Tensor:
    """∂Σ/∂S; 0 if the losses do not depend on S at all."""
    if not losses.requires_grad:
        return torch.zeros_like(S)
    (gradient,) = torch.autograd.grad(losses.sum(), S, allow_unused=True)
    return torch.zeros_like(S) if gradient is None else gradient


def _differs(actual: Tensor, expected: Tensor, tolerance: float = CLOSE) -> tuple[int, ...] | None:
    """Where two tensors differ most, or None if they do not."""
    if actual.numel() == 0:
        return None
    actual, expected = actual.detach(), expected.detach()
    scale = 1 + expected.abs().nan_to_num(0, 0).amax()
    apart = torch.where(actual == expected, 0, (actual - expected).abs()).nan_to_num(torch.inf)  # equal infinities are equal
    if bool((apart <= tolerance * scale).all()):
        return None
    place = torch.unravel_index(apart.argmax(), apart.shape)
    return tuple(int(index) for index in place)


def _shown(value: Tensor) -> str:
    return f"{float(value):.6g}"


@contextmanager
def _explained(who: str, what: str) -> Iterator[None]:
    """Raises whatever a loss raises as the sentence of a failed check."""
    try:
        yield
    except (InputError, AssertionError):
        raise
    except NotImplementedError as error:
        raise AssertionError(f"{who}: {UNSTATED}") from error
    except Exception as error:
        raise AssertionError(f"{who}: {what} raised {type(error).__name__} ({error})") from error
