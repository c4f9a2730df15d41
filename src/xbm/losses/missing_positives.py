"""A warning for losses that train on nothing, because no anchor has a positive."""

import sys
import warnings

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing, among

PATIENCE = 8  # calls in a row without a positive


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
