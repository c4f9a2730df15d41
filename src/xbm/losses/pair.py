"""What all pair-weighted losses share: the call, the checks, and the weights of the GPW framework (the paper's Eq. 1)."""

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xbm import engine as engines
from xbm.checks import check_device, check_embeddings, check_integers, sound_rows
from xbm.engine.terms import LOSSES, Combined, Side, Spread, Terms
from xbm.errors import InputError, unknown
from xbm.memory import CrossBatchMemory

REDUCTIONS = ("sum", "mean", "balanced")
EXCLUDES = ("instance", "copy")


class PairLoss(nn.Module):
    """A loss of the form L = 1/m Σ_i loss(P_i, N_i) over the positives and negatives of each anchor.

    A subclass states its mathematics twice: `dense`, the plain formula, which autograd differentiates (the oracle), and
    `floor`, `negative`, `positive`, `combine`, its one-pass form (see `terms.py`), from which the engines make value and
    gradient together.

    Args:
        reduction: "sum" is the paper; "mean" averages an anchor's pairs; "balanced" is the sum with a push that never outweighs
            the pull, see each loss.
        engine: "auto", "reference", "streaming" or "triton".
        exclude: which rows are the anchor itself. "instance": every row with the anchor's id (needs ids; the default when
            they are given). "copy": only the newest copy of the anchor's image, older ones count as positives.
    """

    name: ClassVar[str]
    hyperparameters: ClassVar[tuple[str, ...]] = ()
    ranks_positives: ClassVar[bool] = False
    one_reduction: ClassVar[bool] = False  # all reductions are the same
    spec: str  # the loss as text, see `engine.terms.from_spec`; always that of the hyper-parameters as they are

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        LOSSES[cls.name] = cls

    def __init__(self, reduction: str = "sum", engine: str = "auto", exclude: str | None = None) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise unknown("reduction", reduction, REDUCTIONS)
        if engine not in engines.ENGINES:
            raise unknown("engine", engine, engines.ENGINES)
        if exclude is not None and exclude not in EXCLUDES:
            raise unknown("exclude", exclude, EXCLUDES)
        self.reduction, self.engine, self.exclude = reduction, engine, exclude

    # ---------------------------------------------------------------- the mathematics, stated by each loss

    def dense(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(m,): each anchor's loss from the whole similarity matrix S (m, M) and the masks of its pairs."""
        raise NotImplementedError

    def floor(self, p: Side) -> Tensor | float:
        """Only negatives with S above this are valid."""
        return -torch.inf

    def negative(self, s: Tensor, p: Side, spread: Spread) -> Terms:
        """What valid negatives add, given the extremes (and ranks) of the positives."""
        raise NotImplementedError

    def positive(self, s: Tensor, n: Side, spread: Spread) -> Terms:
        """What positives add, given the finished negative side."""
        raise NotImplementedError

    def combine(self, p: Side, n: Side) -> Combined:
        """The anchor's loss and the coefficients of its gradient sums."""
        raise NotImplementedError

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
        """The loss of the anchors (m, D) against the memory's rows or, without a memory, against each other.

        Raises:
            InputError: anything that does not fit, in one sentence.
        """
        pairing = self.pair(anchors, labels, memory, ids, exclude)
        loss, stats = engines.compare(self, anchors, pairing, self.engine, return_stats)
        if not return_stats:
            return loss
        positives, negatives, hardest, easiest_positive, hardest_positive = stats[:5]
        unsound = stats[5] if pairing.sound is None else pairing.unsound()
        return loss, PairStats(positives, negatives, hardest, easiest_positive, hardest_positive, unsound)

    def with_gradient(
        self, anchors: Tensor, labels: Tensor, memory: CrossBatchMemory | None = None, *,
        ids: Tensor | None = None, exclude: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The loss and its gradient in the anchors, as plain tensors: `anchors.backward(gradient)` goes on from there.

        The same as calling the loss and then `loss.backward()`, without what autograd costs the host for it: on a GPU that is
        more than the kernels take.

        Example:
            >>> from xbm import ContrastiveLoss
            >>> anchors = torch.eye(4)[[0, 0, 1, 2]].requires_grad_()
            >>> loss, gradient = ContrastiveLoss().with_gradient(anchors, torch.tensor([0, 0, 1, 1]))
            >>> anchors.backward(gradient)
            >>> loss.item(), torch.equal(anchors.grad, gradient)
            (0.5, True)

        Raises:
            InputError: anything that does not fit, among it a memory whose rows have a gradient of their own.
        """
        if memory is not None and memory.rows.requires_grad:
            raise InputError(f"update={memory.update!r} has a gradient for the memory's rows too: call the loss and backward()")
        pairing = self.pair(anchors, labels, memory, ids, exclude)
        return engines.gradient(self, anchors, pairing, self.engine)

    def weights(self, S: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The paper's w_ij: m·∂L/∂S_ij for negatives, −m·∂L/∂S_ij for positives, 0 elsewhere.

        Example:
            >>> from xbm import ContrastiveLoss
            >>> S = torch.tensor([[0.9, 0.6, 0.4]])
            >>> positive = torch.tensor([[True, False, False]])
            >>> ContrastiveLoss().weights(S, positive, ~positive).tolist()
            [[1.0, 1.0, 0.0]]
        """
        return engines.dense_weights(self, S, positive, negative)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        named = (*self.hyperparameters, "reduction")
        if name in named:  # made here and not on use: torch.compile cannot trace json
            values = {key: self.__dict__[key] for key in named if key in self.__dict__}
            self.__dict__["spec"] = json.dumps({"loss": getattr(self, "name", None), **values})

    def extra_repr(self) -> str:
        shown = {key: getattr(self, key) for key in (*self.hyperparameters, "reduction", "engine")}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())

    # ---------------------------------------------------------------- who is compared with whom

    def pair(
        self,
        anchors: Tensor,
        labels: Tensor,
        memory: CrossBatchMemory | None,
        ids: Tensor | None,
        exclude: str | None = None,
    ) -> engines.Pairing:
        """Which rows the anchors are compared with, and which of them count as positives and negatives."""
        exclude = exclude or self.exclude
        if exclude is not None and exclude not in EXCLUDES:
            raise unknown("exclude", exclude, EXCLUDES)
        check_embeddings(anchors, "anchors", memory.dim if memory is not None else None)
        labels = check_integers(labels, "labels", anchors)
        if ids is not None:
            ids = check_integers(ids, "ids", anchors)
        if memory is not None:
            check_device(anchors, "the anchors", memory.rows, "the memory")
        if exclude == "instance" and ids is None:
            raise InputError('exclude="instance" leaves out rows by their instance id: pass ids')
        exclude = exclude or ("copy" if ids is None else "instance")
        by_id = exclude == "instance"
        rows = anchors if memory is None else memory.rows
        if engines.chosen(self, anchors, rows, self.engine) == "triton":
            return self._pair_unseen(rows, labels, memory, ids, by_id)
        everyone = torch.ones_like(labels, dtype=torch.bool)
        sound = sound_rows(anchors.detach(), everyone, ids, 0) if len(labels) else everyone
        shared: dict[str, Any] = {"labels": labels, "sound": sound}
        if memory is None:
            own = None if by_id else torch.arange(len(labels), device=labels.device)
            return engines.Pairing(
                rows=anchors, row_labels=labels, stamps=sound.long() - 1, ids=ids if by_id else None,
                row_ids=ids if by_id else None, own=own, **shared,
            )  # fmt: skip
        if ids is None:
            if memory.update != "queue":
                raise InputError(f"update={memory.update!r} keeps one slot an instance: pass ids to the loss")
            own, just_written = latest_rows(memory, anchors.detach(), labels)
            shared["sound"] = sound & just_written
        else:
            own = None if by_id else memory.latest_copies(ids)
            if ids.device.type == "cpu":
                shared["sound"] = all_named(memory.row_ids, memory.stamps, sound)
        return engines.Pairing(
            rows=memory.rows, row_labels=memory.row_labels, stamps=memory.stamps, ids=ids if by_id else None,
            row_ids=memory.row_ids if by_id else None, own=own, **shared,
        )  # fmt: skip

    def _pair_unseen(
        self, rows: Tensor, labels: Tensor, memory: CrossBatchMemory | None, ids: Tensor | None, by_id: bool
    ) -> engines.Pairing:
        """The same for an engine whose kernels look at values as they go, so that nothing is launched here for it."""
        if memory is None:  # the stamps of a batch say which anchors are sound: the engine's to find
            return engines.Pairing(rows, labels, labels.new_empty(0), labels, None, ids, ids if by_id else None)
        if ids is None and memory.update != "queue":
            raise InputError(f"update={memory.update!r} keeps one slot an instance: pass ids to the loss")
        return engines.Pairing(
            rows, memory.row_labels, memory.stamps, labels, None, ids, memory.row_ids if by_id else None,
            own=None if by_id or ids is None else memory.latest_copies(ids),
            latest=(memory.pointer, memory.latest) if ids is None else None,
        )  # fmt: skip


@dataclass
class PairStats:
    """What the anchors met, as device tensors of shape (m,); by attribute or by name, `stats["valid_negatives"]`."""

    valid_positives: Tensor
    valid_negatives: Tensor
    hardest_negative: Tensor  # largest similarity among the negatives, -inf if there are none
    easiest_positive: Tensor  # largest similarity among the positives, -inf if there are none
    hardest_positive: Tensor  # smallest similarity among the positives, +inf if there are none
    unsound: Tensor  # (), anchors that had to be left out

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)

    def read(self) -> dict[str, Tensor]:
        """All of it on the host.

        Raises:
            InputError: an anchor was unsound where the device could not be stopped to say so; it added nothing.
        """
        if bad := int(self.unsound):
            raise InputError(
                f"{bad} anchors were left out: not finite, not of unit length, with a negative id, "
                "or (without ids) not the rows enqueued last"
            )
        return {field.name: getattr(self, field.name).cpu() for field in fields(self) if field.name != "unsound"}


def masked_lse(logits: Tensor, mask: Tensor) -> Tensor:
    """log Σ e^logit over the marked entries of each row, -inf (and no gradient) where there are none."""
    some = mask.any(1)
    return torch.where(some, logits.where(mask | ~some[:, None], -torch.inf).logsumexp(1), -torch.inf)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact everywhere: torch's own is linear from 20 on."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


@torch.library.custom_op("xbm::same_rows", mutates_args=())
def same_rows(anchors: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, slots: Tensor, latest: Tensor) -> Tensor:
    """Which anchors are the rows just enqueued, in order: without ids nothing else tells an anchor's own copy."""
    found = slots.clamp(min=0)
    same = (rows[found] == anchors.to(rows.dtype)).all(1) & (row_labels[found] == labels)
    same = (same | (slots < 0)) & (latest == len(labels)) | (latest == 0)  # nothing is like an empty memory's rows
    if anchors.device.type == "cpu" and not bool(same.all()):
        raise InputError("these anchors are not the rows enqueued last, in the same order: pass ids to enqueue and to the loss")
    return same


@same_rows.register_fake
def _(anchors: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, slots: Tensor, latest: Tensor) -> Tensor:
    return torch.empty_like(labels, dtype=torch.bool)


def latest_rows(memory: CrossBatchMemory, anchors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    slots = memory.latest_slots(len(labels))
    same = same_rows(anchors, labels, memory.rows.detach(), memory.row_labels, slots, memory.latest)
    return slots, same


@torch.library.custom_op("xbm::all_named", mutates_args=())
def all_named(row_ids: Tensor, stamps: Tensor, sound: Tensor) -> Tensor:
    """Raises if some rows were enqueued without ids: an anchor's own copy could then hide among them."""
    if bool(((row_ids < 0) & (stamps >= 0)).any()):
        raise InputError("the memory holds rows without ids: pass ids to every enqueue, or to none and not to the loss")
    return sound.clone()


@all_named.register_fake
def _(row_ids: Tensor, stamps: Tensor, sound: Tensor) -> Tensor:
    return torch.empty_like(sound)
