"""Losses of pytorch-metric-learning, called like those of this package."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xbm.checks import check_memory
from xbm.engine.pairing import Pairing, check_references, pair
from xbm.errors import InputError, unknown
from xbm.losses.pair import CHOICES, MissingPositives, PairLoss
from xbm.memory import CrossBatchMemory

# How a loss of pytorch-metric-learning compares, by class; a subclass compares like its base. Any other loss takes a list of
# pairs between anchors and reference rows, and therefore a memory.
PROXIES = {
    "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "P2SGradLoss", "ProxyAnchorLoss", "ProxyNCALoss", "SoftTripleLoss",
}  # fmt: skip
BY_LABELS = {
    "FastAPLoss", "InstanceLoss", "MultipleLosses", "NCALoss", "PNPLoss", "RankedListLoss", "SmoothAPLoss",
}  # fmt: skip
# these take pairs, but use the position of a reference row as that of an anchor
IN_BATCH = {"HistogramLoss", "LiftedStructureLoss", "NPairsLoss", "ThresholdConsistentMarginLoss"}
REFUSED = {
    "CrossBatchMemory": "has a memory of its own: wrap the loss inside it instead",
    "ManifoldLoss": "takes no labels: call it directly",
    "SelfSupervisedLoss": "takes no labels: call it directly",
    "VICRegLoss": "takes no labels: call it directly",
}
OURS = {"LiftedStructureLoss", "NPairsLoss"}  # losses of IN_BATCH that this package has, with a memory


class MetricLearningLoss(nn.Module):
    """Wraps a loss of pytorch-metric-learning so that it is called like ours.

    - A loss over pairs or triplets gets the pairs of this package: an anchor's own copy is excluded by id before anything is
      mined or weighted. They are passed as lists, which waits for the device and takes memory; the losses of this package do
      neither. Such a loss takes a memory (except HistogramLoss, LiftedStructureLoss, NPairsLoss,
      ThresholdConsistentMarginLoss, and TripletMarginLoss with `swap=True`).
    - A loss against proxies or class weights (ProxyAnchorLoss, ProxyNCALoss, SoftTripleLoss, ArcFaceLoss, ...) gets the anchors
      and their labels. Its proxies stand for every class already, so it takes no memory, and ids change nothing. Its parameters
      are those of this module: pass `loss_fn.parameters()` to the optimizer, and save `loss_fn.state_dict()`.
    - A loss that finds its pairs in the labels of the batch (FastAPLoss, SmoothAPLoss, RankedListLoss, PNPLoss, InstanceLoss,
      NCALoss, MultipleLosses) takes no memory either, and ids change nothing.

    Tensors that a loss keeps as plain attributes become buffers, so that they are moved and saved with the rest.

    Args:
        loss: the loss, built by you.
        exclude: which rows are the anchor itself, as for the losses of this package.

    Raises:
        InputError: if the loss takes no labels, has a memory of its own, or is no loss over pairs.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ContrastiveLoss, ProxyAnchorLoss
        >>> loss_fn = MetricLearningLoss(ContrastiveLoss())
        >>> v, labels = torch.nn.functional.normalize(torch.randn(4, 8)), torch.tensor([0, 0, 1, 1])
        >>> memory = CrossBatchMemory(size=10, dim=8)
        >>> memory.enqueue(v, labels)
        >>> loss_fn(v, labels, memory).shape
        torch.Size([])
        >>> loss_fn = MetricLearningLoss(ProxyAnchorLoss(num_classes=2, embedding_size=8))
        >>> loss_fn(v, labels).shape, [tuple(proxies.shape) for proxies in loss_fn.parameters()]
        (torch.Size([]), [(2, 8)])
    """

    def __init__(self, loss: Callable[..., Tensor], exclude: str | None = None) -> None:
        super().__init__()
        _check_loss(loss)
        if exclude not in CHOICES["exclude"]:
            raise unknown("exclude", exclude, [each for each in CHOICES["exclude"] if each])
        if isinstance(loss, nn.Module):
            _keep_tensors(loss)
        self.loss, self.exclude = loss, exclude
        self.missing_positives = MissingPositives()

    @staticmethod
    def takes_memory(loss: object) -> bool:
        """Whether a loss, or every loss of a class, can be called with a memory.

        Example:
            >>> from pytorch_metric_learning import losses
            >>> MetricLearningLoss.takes_memory(losses.TripletMarginLoss), MetricLearningLoss.takes_memory(losses.ArcFaceLoss)
            (True, False)
        """
        kind = loss if isinstance(loss, type) else type(loss)
        swaps = bool(_known(kind, {"TripletMarginLoss"})) and getattr(loss, "swap", False)
        return not swaps and not _known(kind, PROXIES | BY_LABELS | IN_BATCH | set(REFUSED))

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
        return_stats: bool = False,
    ) -> Tensor:
        """The loss of the anchors against references and memory or, without either, against each other or the proxies.

        Args:
            anchors: (m, D), unit rows.
            labels: (m,), integers; for a loss with proxies 0 ≤ label < num_classes.
            memory: the rows to compare with.
            ids: (m,), the instance (for example the image) that each anchor comes from.
            references: (r, D), live rows on the other side, with their labels and ids; see `PairLoss.forward`.
            return_stats: not supported: these losses do not count pairs.

        Raises:
            InputError: if an argument is invalid, or if the loss takes no memory or references.
        """
        check_memory(memory)
        kind = type(self.loss)
        if (memory is not None or references is not None) and not self.takes_memory(self.loss):
            self._refuse_memory(kind)
        if return_stats:
            raise InputError(f"{kind.__name__} has no statistics of pairs: leave out return_stats")
        live = check_references(anchors, labels, ids, references, reference_labels, reference_ids)
        if _known(kind, PROXIES | BY_LABELS):
            labels = pair(anchors, labels, None, ids, None).labels
            if len(anchors) == 0:
                return anchors.sum() * 0
            for each in _each(self.loss):
                if _known(type(each), PROXIES):
                    _check_proxies(each, anchors, labels)
            return self._call(anchors, labels)
        pairing = pair(anchors, labels, memory, ids, self.exclude, references=live)
        rows, row_labels, positive, negative = _written(pairing)
        if len(rows) == 0 or len(anchors) == 0:
            return anchors.sum() * 0
        self.missing_positives.look(pairing, torch.where(positive.any(0), 0.0, -torch.inf))
        pairs = (*positive.T.nonzero(as_tuple=True), *negative.T.nonzero(as_tuple=True))  # ordered by anchor, as theirs are
        # in a batch the reference rows must be the anchors themselves: some losses accept no others
        given = {} if pairing.in_batch else {"ref_emb": rows.to(anchors.dtype), "ref_labels": row_labels}
        return self._call(anchors, pairing.labels, indices_tuple=pairs, **given)

    def _call(self, *arguments: Any, **named: Any) -> Tensor:
        value = self.loss(*arguments, **named)
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.requires_grad:  # what DynamicSoftMarginLoss keeps would lead the next backward pass into this graph
                    setattr(module, name, buffer.detach())
        return value

    def _refuse_memory(self, kind: type) -> None:
        name, does = kind.__name__, "compares only the anchors of a batch with each other: omit the memory and the references"
        if _known(kind, PROXIES):
            does = "compares anchors with its own proxies, which stand for every class: omit the memory and the references"
            raise InputError(f"{name} {does}")
        if _known(kind, {"TripletMarginLoss"}):
            raise InputError(f"{name} with swap=True {does}, or set swap=False")
        raise InputError(f"{name} {does}" + (f", or use xbm.{name}" if name in OURS else ""))


def _known(kind: type, names: set[str]) -> str:
    """The nearest of these classes of pytorch-metric-learning that a class is derived from; "" if there is none."""
    theirs = (base for base in kind.__mro__ if base.__module__.split(".")[0] == "pytorch_metric_learning")
    return next((base.__name__ for base in theirs if base.__name__ in names), "")


def _each(loss: Any) -> Iterator[Any]:
    """The loss, or those of which MultipleLosses is the sum, at any depth."""
    if _known(type(loss), {"MultipleLosses"}):
        for each in loss.losses.values() if loss.is_dict else loss.losses:
            yield from _each(each)
    else:
        yield loss


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise InputError(f"loss must be a loss, got the class {loss.__name__}: pass an object, {loss.__name__}(...)")
    if not callable(loss):
        raise InputError(f"loss must be a loss of pytorch-metric-learning, got {loss!r}: pass an object, such as CircleLoss()")
    for each in _each(loss):
        kind = type(each)
        if reason := REFUSED.get(_known(kind, set(REFUSED))):
            raise InputError(f"{kind.__name__} of pytorch-metric-learning {reason}")
        if isinstance(each, PairLoss | MetricLearningLoss):
            raise InputError(f"{kind.__name__} is a loss of xbm: call it directly, without MetricLearningLoss")
    if not _known(type(loss), PROXIES | BY_LABELS) and not _takes_pairs(loss):
        raise InputError(
            f"{type(loss).__name__} takes no indices_tuple, which lists the pairs: pass a loss of pytorch-metric-learning, or "
            "call this one directly"
        )


def _takes_pairs(loss: Callable) -> bool:
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError):  # not known
        return True
    return "indices_tuple" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _written(pairing: Pairing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows that count, their labels, and the masks of the pairs (rows, anchors).

    Some losses compare labels once more, so they must not see rows that were never written or are ignored.
    """
    positive, negative = pairing.masks()
    rows = pairing.rows
    if pairing.references is not None:
        rows = torch.cat([pairing.references, rows.to(pairing.references.dtype)])
    parts = (rows, pairing.row_labels, positive, negative)
    written = pairing.stamps >= 0
    if pairing.in_batch or bool(written.all()):
        return parts
    rows, row_labels, positive, negative = (part[written] for part in parts)
    return rows, row_labels, positive, negative


def _check_proxies(loss: Any, anchors: Tensor, labels: Tensor) -> None:
    """Refuses anchors of another dimension than the proxies' and, on a CPU, where looking costs nothing, labels without one."""
    columns = next((getattr(loss, name) for name in ("W", "fc", "weight") if hasattr(loss, name)), None)
    by_class = loss.proxies if columns is None else columns.T  # SoftTripleLoss and SubCenterArcFaceLoss have several per class
    if (dim := by_class.shape[1]) != anchors.shape[1]:
        size = "descriptors_dim" if hasattr(loss, "descriptors_dim") else "embedding_size"
        raise InputError(
            f"{type(loss).__name__} has proxies of dimension {dim}, the anchors have {anchors.shape[1]} columns: build the "
            f"loss with {size}={anchors.shape[1]}"
        )
    if labels.device.type != "cpu":
        return
    # ProxyNCALoss leaves num_classes at 0, and NormalizedSoftmaxLoss has none
    classes = getattr(loss, "num_classes", 0) or len(by_class)
    lowest, highest = int(labels.min()), int(labels.max())
    if not 0 <= lowest <= highest < classes:
        raise InputError(
            f"{type(loss).__name__} has proxies for {classes} classes, got labels from {lowest} to {highest}: "
            "number the classes from 0, or build the loss with more of them"
        )


def _keep_tensors(loss: nn.Module) -> None:
    """Turns tensors that are plain attributes into buffers, except statistics, which a loss resets to plain numbers."""
    for module in loss.modules():
        statistics = getattr(module, "_record_these_stats", ())
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and name not in statistics:
                delattr(module, name)
                module.register_buffer(name, value)
