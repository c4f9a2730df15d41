"""The loss of the global batch on every rank: its value, and the gradient of the rank's own anchors."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from xbm.checks import check_embeddings, check_integers, sound_rows
from xbm.distributed.distributed_memory import ReplicatedMemory, ShardedMemory
from xbm.distributed.ranks import Gathered, Ranks, batch_sizes, gather, padded, require_ids, the_ranks
from xbm.engine import streaming
from xbm.engine.pairing import EXCLUDES, Pairing
from xbm.engine.terms import Result
from xbm.errors import InputError, unknown
from xbm.losses.pair import OnePass, PairLoss, PairStats
from xbm.memory import CrossBatchMemory


class GlobalLoss(nn.Module):
    """Computes a pair loss over the global batch. Call it on every rank with the rank's own anchors, labels and ids.

    The value, identical on every rank, is the loss that a single process would compute for all anchors together. The gradient
    of the anchors is R times that of a single process: DistributedDataParallel averages over the ranks where a sum is needed,
    so the gradients of the parameters equal those of a single process. Gradients of a memory's rows are not averaged, and
    therefore not scaled. Statistics are those of the rank's own anchors.

    Args:
        loss: any pair loss of the package.
        ranks: the processes; by default all of the default process group.

    Example:
        >>> from xbm import ContrastiveLoss
        >>> loss_fn, memory = GlobalLoss(ContrastiveLoss()), ReplicatedMemory(size=10, dim=4)
        >>> v, labels, ids = torch.eye(3, 4, requires_grad=True), torch.tensor([0, 0, 1]), torch.arange(3)
        >>> memory.enqueue(v.detach(), labels, ids)
        >>> loss_fn(v, labels, memory, ids=ids).item()  # two of three anchors have a positive, at S = 0
        0.6666666865348816
    """

    def __init__(self, loss: PairLoss, ranks: Ranks | None = None) -> None:
        super().__init__()
        if not isinstance(loss, PairLoss):
            raise InputError(f"loss must be a pair loss of xbm, got {type(loss).__name__}")
        self.loss = loss
        self.ranks = the_ranks() if ranks is None else ranks

    def forward(
        self,
        anchors: Tensor,
        labels: Tensor,
        memory: ReplicatedMemory | ShardedMemory | None = None,
        *,
        ids: Tensor | None = None,
        exclude: str | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, PairStats]:
        check_embeddings(anchors, "anchors", memory.dim if memory is not None else None)
        labels = check_integers(labels, "labels", anchors)
        ids = None if ids is None else check_integers(ids, "ids", anchors)
        stats: PairStats | None
        if memory is None:
            value, stats = self._in_batch(anchors, labels, ids, exclude)
        elif isinstance(memory, ShardedMemory):
            value, stats = self._sharded(anchors, labels, memory, require_ids(ids), exclude, return_stats)
        elif isinstance(memory, ReplicatedMemory):
            value, stats = self._replicated(anchors, labels, memory, require_ids(ids), exclude)
        else:
            raise InputError(f"memory must be a ReplicatedMemory or ShardedMemory, got {type(memory).__name__}")
        if not return_stats:
            return value
        assert stats is not None
        return value, stats

    def _in_batch(self, anchors: Tensor, labels: Tensor, ids: Tensor | None, exclude: str | None) -> tuple[Tensor, PairStats]:
        """Computes all m × m pairs on every rank, so that no gradient needs to be sent back to the rank of a row."""
        batch = gather(self.ranks, anchors, labels, ids)
        rows = list(batch.embeddings.split(batch.sizes))
        rows[self.ranks.rank] = _ScaledGradient.apply(anchors, self.ranks.world)
        value, stats = self.loss(torch.cat(rows), batch.labels, ids=batch.ids, exclude=exclude, return_stats=True)
        return value, _own(stats, batch.mine)

    def _replicated(
        self, anchors: Tensor, labels: Tensor, memory: ReplicatedMemory, ids: Tensor, exclude: str | None
    ) -> tuple[Tensor, PairStats]:
        total = sum(batch_sizes(self.ranks, anchors, labels, ids))
        scaled_anchors = _ScaledGradient.apply(anchors, self.ranks.world)
        value, stats = self.loss(scaled_anchors, labels, memory, ids=ids, exclude=exclude, return_stats=True)
        value = value * (len(anchors) / max(1, total))
        return _ReplacedValue.apply(value, self.ranks.sum(value.detach(), "value")), stats

    def _sharded(
        self, anchors: Tensor, labels: Tensor, memory: ShardedMemory, ids: Tensor, exclude: str | None, stats: bool
    ) -> tuple[Tensor, PairStats | None]:
        self.loss.refuse_parameters()
        exclude = exclude or self.loss.exclude or "instance"
        if exclude not in EXCLUDES:
            raise unknown("exclude", exclude, EXCLUDES)
        batch = gather(self.ranks, anchors, labels, ids)
        pairing = pair_shard(memory, batch, exclude)
        assert pairing.sound is not None
        engine, grad = _ShardEngine(self.ranks, batch), torch.is_grad_enabled()
        wanted = (grad and anchors.requires_grad, grad and memory.rows.requires_grad)
        value, *parts = OnePass.apply(anchors, memory.rows, pairing, self.loss, engine, wanted, stats)
        if not stats:
            return value, None
        return value, _own(PairStats(*[*parts, (~pairing.sound).sum()]), batch.mine)


def pair_shard(memory: ShardedMemory, batch: Gathered, exclude: str) -> Pairing:
    """Pairs the anchors of all ranks with the rows of this rank's shard."""
    assert batch.ids is not None
    shard: CrossBatchMemory = memory.shard
    everyone = torch.ones_like(batch.labels, dtype=torch.bool)
    sound = sound_rows(batch.embeddings, everyone, batch.ids, 0) if len(everyone) else everyone
    by_id = exclude == "instance" and memory.update == "queue"  # a keyed memory has one row per id, found by its slot
    return Pairing(
        rows=shard.rows, row_labels=shard.row_labels, stamps=shard.stamps, labels=batch.labels, sound=sound,
        ids=batch.ids if by_id else None, row_ids=shard.row_ids if by_id else None,
        own=None if by_id else memory.own_slots(batch.ids),
    )  # fmt: skip


class _ShardEngine:
    """The streaming engine on one shard: anchors of all ranks, and what a loss needs from the other shards is exchanged."""

    def __init__(self, ranks: Ranks, batch: Gathered) -> None:
        self.ranks, self.batch = ranks, batch

    def compare(
        self, loss: PairLoss, anchors: Tensor, pairing: Pairing, gradient: bool, row_gradient: bool, stats: bool
    ) -> Result:
        """The loss of the global batch, and its gradients in this rank's anchors (R times) and rows."""
        batch = self.batch
        result = streaming.compare(loss, batch.embeddings, pairing, gradient, row_gradient, stats, shards=self.ranks)
        parts = [padded(part, max(batch.sizes)) for part in result.gradient.split(batch.sizes)]
        of_anchors = self.ranks.scattered_sum(torch.stack(parts), "gradient of the anchors")[: len(anchors)]
        return result._replace(gradient=of_anchors * self.ranks.world, statistics=tuple(x.clone() for x in result.statistics))


class _ScaledGradient(torch.autograd.Function):
    """Returns the same tensor and multiplies its gradient by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.factor, None


class _ReplacedValue(torch.autograd.Function):
    """Returns the value of the global loss with the gradient of this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


def _own(stats: PairStats, mine: slice) -> PairStats:
    """The statistics of this rank's anchors; the number of unsound anchors is that of all ranks."""
    return PairStats(**{f.name: stats[f.name] if f.name == "unsound" else stats[f.name][mine] for f in fields(stats)})
