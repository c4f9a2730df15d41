"""The loss of the global batch on every rank: its value, and the gradient of the rank's own anchors."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from xbm.checks import check_embeddings, check_integers, sound_rows
from xbm.distributed.distributed_memory import ReplicatedMemory, ShardedMemory
from xbm.distributed.ranks import Gathered, Ranks, batch_sizes, gather, padded, require_ids, the_ranks
from xbm.engine import streaming
from xbm.engine.pairing import EXCLUDES, Pairing, References, among, check_references, last_match
from xbm.engine.terms import PairStats, Result
from xbm.errors import InputError, unknown
from xbm.losses.pair import OnePass, PairLoss
from xbm.memory import CrossBatchMemory


class GlobalLoss(nn.Module):
    """Computes a pair loss over the global batch. Call it on every rank with the rank's own anchors, labels and ids.

    The value, identical on every rank, is the loss that a single process would compute for all anchors together. The gradient
    of the anchors is R times that of a single process: DistributedDataParallel averages over the ranks where a sum is needed,
    so the gradients of the parameters equal those of a single process. Gradients of a memory's rows are not averaged, and
    therefore not scaled; a learned temperature gets the same full gradient on every rank. Statistics are those of the rank's
    own anchors.

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
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        reference_ids: Tensor | None = None,
        exclude: str | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, PairStats]:
        """The arguments are those of `PairLoss.forward`; anchors meet the references of all ranks."""
        check_embeddings(anchors, "anchors", memory.dim if memory is not None else None)
        labels = check_integers(labels, "labels", anchors)
        ids = None if ids is None else check_integers(ids, "ids", anchors)
        live = check_references(anchors, labels, ids, references, reference_labels, reference_ids)
        if memory is not None:
            ids = require_ids(ids)
        if isinstance(memory, ShardedMemory):
            assert ids is not None
            return self._sharded(anchors, labels, memory, ids, live, exclude, return_stats)
        if memory is not None and not isinstance(memory, ReplicatedMemory):
            raise InputError(f"memory must be a ReplicatedMemory or ShardedMemory, got {type(memory).__name__}")
        if memory is None and live is None:
            value, stats = self._in_batch(anchors, labels, ids, exclude)
        else:
            value, stats = self._own_anchors(anchors, labels, memory, ids, live, exclude)
        return (value, stats) if return_stats else value

    def _in_batch(self, anchors: Tensor, labels: Tensor, ids: Tensor | None, exclude: str | None) -> tuple[Tensor, PairStats]:
        """Computes all m × m pairs on every rank, so that no gradient needs to be sent back to the rank of a row."""
        batch = gather(self.ranks, anchors, labels, ids)
        rows = list(batch.embeddings.split(batch.sizes))
        rows[self.ranks.rank] = _ScaledGradient.apply(anchors, self.ranks.world)
        value, stats = self.loss(torch.cat(rows), batch.labels, ids=batch.ids, exclude=exclude, return_stats=True)
        return value, _own(stats, batch.mine)

    def _own_anchors(
        self,
        anchors: Tensor,
        labels: Tensor,
        memory: ReplicatedMemory | None,
        ids: Tensor | None,
        live: References | None,
        exclude: str | None,
    ) -> tuple[Tensor, PairStats]:
        """This rank's anchors against rows that every rank has; the gradient of the references goes back to their ranks."""
        total = sum(batch_sizes(self.ranks, anchors, labels, ids))
        named: dict[str, Any] = {"ids": ids, "exclude": exclude, "return_stats": True}
        if live is not None:
            everyones = gather(self.ranks, *live)
            rows = live.rows if self.ranks.world == 1 else _GatheredRows.apply(live.rows, everyones, self.ranks)
            named |= {"references": rows, "reference_labels": everyones.labels, "reference_ids": everyones.ids}
        scaled_anchors = _ScaledGradient.apply(anchors, self.ranks.world)
        if (learned := self._learned(1.0)) is None:
            value, stats = self.loss(scaled_anchors, labels, memory, **named)
        else:
            value, stats = functional_call(self.loss, {"log_temperature": learned}, (scaled_anchors, labels, memory), named)
        value = value * (len(anchors) / max(1, total))
        return _ReplacedValue.apply(value, self.ranks.sum(value.detach(), "value")), stats

    def _learned(self, factor: float) -> Tensor | None:
        """A learned log τ, whose gradient is summed over the ranks' anchors and thus the same on every rank."""
        learned = self.loss.log_temperature
        return None if learned is None else _SummedGradient.apply(learned, self.ranks, factor)

    def _sharded(
        self,
        anchors: Tensor,
        labels: Tensor,
        memory: ShardedMemory,
        ids: Tensor,
        live: References | None,
        exclude: str | None,
        return_stats: bool,
    ) -> Tensor | tuple[Tensor, PairStats]:
        """All ranks' anchors against this rank's shard and references, which are thus compared, and differentiated, once."""
        self.loss.refuse_parameters()
        exclude = self.loss.exclude if exclude is None else exclude
        if exclude is None:
            exclude = "instance" if live is None else "none"
        if exclude not in EXCLUDES:
            raise unknown("exclude", exclude, EXCLUDES)
        batch = gather(self.ranks, anchors, labels, ids)
        pairing = pair_shard(self.ranks, memory, batch, live, exclude)
        assert pairing.sound is not None
        engine, grad = _ShardEngine(self.ranks, batch), torch.is_grad_enabled()
        learned = self._learned(1 / self.ranks.world)  # the anchors' gradient is R times that of a single process
        leaves = (anchors, memory.rows, pairing.references, None if learned is None else self.loss.bounded(learned))
        wanted = tuple(grad and leaf is not None and leaf.requires_grad for leaf in leaves)
        value, *parts = OnePass.apply(*leaves, pairing, self.loss, engine, wanted, return_stats)
        if not return_stats:
            return value
        return value, _own(PairStats(*[*parts, (~pairing.sound).sum()]), batch.mine)


def pair_shard(ranks: Ranks, memory: ShardedMemory, batch: Gathered, live: References | None, exclude: str) -> Pairing:
    """Pairs the anchors of all ranks with this rank's references and the rows of its shard."""
    assert batch.ids is not None
    shard: CrossBatchMemory = memory.shard
    everyone = torch.ones_like(batch.labels, dtype=torch.bool)
    sound = sound_rows(batch.embeddings, everyone, batch.ids, 0) if len(everyone) else everyone
    if live is not None:
        return _pair_with_references(ranks, memory, batch, live, exclude, sound)
    by_id = exclude == "instance" and memory.update == "queue"  # a keyed memory has one row per id, found by its slot
    return Pairing(
        rows=shard.rows, row_labels=shard.row_labels, stamps=shard.stamps, labels=batch.labels, sound=sound,
        ids=batch.ids if by_id else None, row_ids=shard.row_ids if by_id else None,
        own=None if by_id or exclude == "none" else memory.own_slots(batch.ids),
    )  # fmt: skip


def _pair_with_references(
    ranks: Ranks, memory: ShardedMemory, batch: Gathered, live: References, exclude: str, sound: Tensor
) -> Pairing:
    shard, ids = memory.shard, batch.ids
    assert ids is not None and live.ids is not None
    everyones_ids = ranks.everyone(live.ids, "ids of the references")
    row_ids, all_ids = memory.global_ids(shard.row_ids), torch.cat(everyones_ids)
    gone = among(row_ids, all_ids) if len(all_ids) else torch.zeros_like(row_ids, dtype=torch.bool)
    counts = torch.ones_like(live.labels, dtype=torch.bool)
    if len(counts):
        counts = sound_rows(live.rows.detach(), counts, live.ids, 0)
    own = None
    if exclude == "copy":
        place, older = last_match(ids, live.ids), memory.own_slots(ids)
        start = sum(map(len, everyones_ids[: ranks.rank]))
        newest = ranks.maximum(torch.where(place < 0, -1, place + start), "newest references")
        own = torch.where(
            newest < 0, torch.where(older < 0, -1, older + len(live.rows)), torch.where(place + start == newest, place, -1)
        )
    return Pairing(
        rows=shard.rows,
        row_labels=torch.cat([live.labels, shard.row_labels]),
        stamps=torch.cat([counts.long() - 1, torch.where(gone, -1, shard.stamps)]),
        labels=batch.labels,
        sound=sound,
        ids=ids,
        row_ids=torch.cat([live.ids, row_ids]) if exclude == "instance" else None,
        own=own,
        references=torch.where(counts[:, None], live.rows, 0),
    )


class _ShardEngine:
    """The streaming engine on one shard: anchors of all ranks, and what a loss needs from the other shards is exchanged."""

    def __init__(self, ranks: Ranks, batch: Gathered) -> None:
        self.ranks, self.batch = ranks, batch

    def compare(
        self, loss: PairLoss, anchors: Tensor, pairing: Pairing, gradient: bool, row_gradient: bool, stats: bool, *,
        reference_gradient: bool = False,
    ) -> Result:  # fmt: skip
        """The loss of the global batch, and its gradients in this rank's anchors (R times), references (R times) and rows."""
        batch = self.batch
        result = streaming.compare(
            loss, batch.embeddings, pairing, gradient, row_gradient, stats, self.ranks, reference_gradient=reference_gradient
        )
        if result.reference_gradient is not None:
            result = result._replace(reference_gradient=result.reference_gradient * self.ranks.world)
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


class _SummedGradient(torch.autograd.Function):
    """Returns the same tensor and sums its gradient over the ranks, times `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, factor: float) -> Tensor:
        ctx.ranks, ctx.factor = ranks, factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.sum(upstream, "gradient of the temperature") * ctx.factor, None, None


class _GatheredRows(torch.autograd.Function):
    """Returns the rows of all ranks. This rank's rows get the sum of all ranks' gradients, R times."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, everyones: Gathered, ranks: Ranks) -> Tensor:
        ctx.sizes, ctx.ranks = everyones.sizes, ranks
        return everyones.embeddings.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        parts = [padded(part, max(ctx.sizes)) for part in upstream.split(ctx.sizes)]
        mine = ctx.ranks.scattered_sum(torch.stack(parts), "gradient of the references")[: ctx.sizes[ctx.ranks.rank]]
        return mine * ctx.ranks.world, None, None


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
