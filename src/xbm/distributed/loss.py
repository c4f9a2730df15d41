"""The loss of the global batch, on every rank: its value, and the gradient of the rank's own anchors."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from xbm import engine as engines
from xbm.checks import check_embeddings, check_integers, sound_rows
from xbm.distributed.gather import Gathered, gather, named, sizes_of
from xbm.distributed.ranks import Ranks, padded, the_ranks
from xbm.distributed.replicated import ReplicatedMemory
from xbm.distributed.sharded import ShardedMemory
from xbm.engine.streaming import compare_shard
from xbm.engine.terms import scaled
from xbm.errors import InputError, unknown
from xbm.losses.pair import EXCLUDES, PairLoss, PairStats
from xbm.memory import CrossBatchMemory


class GlobalLoss(nn.Module):
    """Makes a loss one of the global batch: call it on every rank with the rank's own anchors, labels and ids.

    The value is the loss that a single process would find for all anchors together, the same on every rank. The anchors'
    gradient is R times that process's: DistributedDataParallel takes the mean over the ranks where a sum is due, and so the
    parameters' gradients are equal to the single process's. Gradients of a memory's rows are not scaled, since nobody takes
    their mean. Statistics are those of the rank's own anchors.

    Args:
        loss: any of the package's pair losses.

    Example:
        >>> from xbm import ContrastiveLoss
        >>> loss_fn, memory = GlobalLoss(ContrastiveLoss()), ReplicatedMemory(size=10, dim=4)
        >>> v, labels, ids = torch.eye(3, 4, requires_grad=True), torch.tensor([0, 0, 1]), torch.arange(3)
        >>> memory.enqueue(v.detach(), labels, ids)
        >>> loss_fn(v, labels, memory, ids=ids).item()  # two anchors, each with a positive at S = 0
        0.6666666865348816
    """

    def __init__(self, loss: PairLoss, ranks: Ranks | None = None) -> None:
        super().__init__()
        if not isinstance(loss, PairLoss):
            raise InputError(f"GlobalLoss needs a pair loss of xbm, not {type(loss).__name__}: other losses see one rank each")
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
        if memory is None:
            value, stats = self._in_batch(anchors, labels, ids, exclude)
        elif isinstance(memory, ShardedMemory):
            value, stats = self._sharded(anchors, labels, memory, named(ids), exclude, return_stats)
        elif isinstance(memory, ReplicatedMemory):
            value, stats = self._replicated(anchors, labels, memory, named(ids), exclude)
        else:
            raise InputError(
                "with several processes a memory must be told of the others: use ReplicatedMemory or ShardedMemory"
            )
        return (value, stats) if return_stats else value

    def _in_batch(self, anchors: Tensor, labels: Tensor, ids: Tensor | None, exclude: str | None) -> tuple[Tensor, PairStats]:
        """The whole m × m on every rank: as a row an anchor is met by those of all ranks, and nothing need be sent back."""
        batch = gather(self.ranks, anchors, labels, ids)
        rows = list(batch.embeddings.split(batch.sizes))
        rows[self.ranks.rank] = _Times.apply(anchors, self.ranks.world)
        value, stats = self.loss(torch.cat(rows), batch.labels, ids=batch.ids, exclude=exclude, return_stats=True)
        return value, _own(stats, batch.mine)

    def _replicated(
        self, anchors: Tensor, labels: Tensor, memory: ReplicatedMemory, ids: Tensor, exclude: str | None
    ) -> tuple[Tensor, PairStats]:
        total = sum(sizes_of(self.ranks, anchors, labels, ids))
        kept = _Times.apply(anchors, self.ranks.world)
        value, stats = self.loss(kept, labels, memory, ids=ids, exclude=exclude, return_stats=True)
        value = value * (len(anchors) / max(1, total))
        return _Told.apply(value, self.ranks.sum(value.detach(), "value")), stats

    def _sharded(
        self, anchors: Tensor, labels: Tensor, memory: ShardedMemory, ids: Tensor, exclude: str | None, stats: bool
    ) -> tuple[Tensor, PairStats]:
        exclude = exclude or self.loss.exclude or "instance"
        if exclude not in EXCLUDES:
            raise unknown("exclude", exclude, EXCLUDES)
        batch = gather(self.ranks, anchors, labels, ids)
        pairing = pair_shard(memory, batch, exclude)
        with torch.autocast(anchors.device.type, enabled=False):
            value, *parts = _Meet.apply(anchors, memory.rows, self.loss, batch, pairing, self.ranks, stats)
        found = PairStats(parts[0], parts[1], parts[2], parts[3], parts[4], pairing.unsound())
        return value, _own(found, batch.mine)


def pair_shard(memory: ShardedMemory, batch: Gathered, exclude: str) -> engines.Pairing:
    """All anchors, and the rows of one shard."""
    assert batch.ids is not None
    shard: CrossBatchMemory = memory.shard
    everyone = torch.ones_like(batch.labels, dtype=torch.bool)
    sound = sound_rows(batch.embeddings, everyone, batch.ids, 0) if len(everyone) else everyone
    by_id = exclude == "instance" and memory.update == "queue"  # a keyed memory has one row an id: its slot says it all
    return engines.Pairing(
        rows=shard.rows, row_labels=shard.row_labels, stamps=shard.stamps, labels=batch.labels, sound=sound,
        ids=batch.ids if by_id else None, row_ids=shard.row_ids if by_id else None,
        own=None if by_id else memory.own_slots(batch.ids),
    )  # fmt: skip


class _Exchange:
    """The engine's view of the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank = ranks, ranks.rank

    def maximum(self, x: Tensor) -> Tensor:
        return self.ranks.maximum(x, "extremes")

    def sum(self, x: Tensor) -> Tensor:
        return self.ranks.sum(x, "sums")

    def everyone(self, x: Tensor) -> list[Tensor]:
        return self.ranks.everyone(x, "positives")


class _Meet(torch.autograd.Function):
    """All anchors against this rank's shard; what the others found is added on the way."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, rows: Tensor, loss: PairLoss, batch: Gathered, pairing: engines.Pairing, ranks: Ranks,
        stats: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        everyone, m = batch.embeddings, max(1, len(batch.labels))
        assert pairing.sound is not None
        if everyone.device.type != "cpu":  # there an unsound anchor could not be refused; it must not spread NaN
            everyone = torch.where(pairing.sound[:, None], everyone, 0)
        found = compare_shard(loss, everyone, pairing, ctx.needs_input_grad[1], stats, _Exchange(ranks))
        longest = max(batch.sizes)
        parts = [padded(part, longest) for part in found.gradient.split(batch.sizes)]
        gradient = ranks.scattered_sum(torch.stack(parts), "gradient of the anchors")[: len(anchors)]
        of_rows = None if found.row_gradient is None else (found.row_gradient / m).to(rows.dtype)
        ctx.save_for_backward((gradient * (ranks.world / m)).to(anchors.dtype), of_rows)
        statistics = tuple(x.clone() for x in found.statistics)
        ctx.mark_non_differentiable(*statistics)
        return found.loss.sum() / m, *statistics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradient, of_rows = ctx.saved_tensors
        return scaled(gradient, upstream), None if of_rows is None else scaled(of_rows, upstream), *[None] * 5


class _Times(torch.autograd.Function):
    """The same tensor, with its gradient taken `factor` times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.factor, None


class _Told(torch.autograd.Function):
    """Says one value and has the gradient of another: the global loss, of which this rank differentiates its own part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, said: Tensor) -> Tensor:
        return said.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


def _own(stats: PairStats, mine: slice) -> PairStats:
    """The statistics of some anchors; the number of unsound ones stays that of all."""
    return PairStats(**{f.name: stats[f.name] if f.name == "unsound" else stats[f.name][mine] for f in fields(stats)})
