"""Memories for several processes: a full copy on every rank, or one shard per rank.

Global slot s of a sharded memory is local slot s // R on rank s mod R.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from xbm.checks import check_state, plain_integer, sound_rows
from xbm.distributed.ranks import Ranks, gather_checked, padded, the_ranks
from xbm.errors import InputError
from xbm.memory import COUNTERS, PER_ROW, CrossBatchMemory, fill_from

ROWS = ("rows", *PER_ROW)  # buffers with one entry per slot; the counters are identical on every rank
BLOCK = 1 << 16  # rows that are sent together when a checkpoint is written


class MemoryOptions(TypedDict, total=False):
    """The other arguments of `CrossBatchMemory`."""

    dtype: torch.dtype
    momentum: float | None
    alpha: float
    device: torch.device | str | None


class ReplicatedMemory(CrossBatchMemory):
    """A memory to which every rank adds its batch, and of which every rank holds an identical copy.

    Use it like `CrossBatchMemory`, with the same calls on all ranks, and pass it to `GlobalLoss`. Keep it outside
    DistributedDataParallel, which would broadcast its buffers at every step. With update="backprop", `step` all-reduces the
    gradient of the rows (M × D).

    Example:
        >>> memory = ReplicatedMemory(size=3, dim=2)
        >>> memory.enqueue(torch.eye(2), torch.tensor([7, 8]), ids=torch.tensor([0, 1]))
        >>> memory.labels.tolist()
        [7, 8]
    """

    def __init__(
        self, size: int, dim: int, update: str = "queue", *, ranks: Ranks | None = None, **options: Unpack[MemoryOptions]
    ) -> None:
        super().__init__(size, dim, update, **options)
        self.ranks = the_ranks() if ranks is None else ranks

    @torch.no_grad()
    def enqueue(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Writes the embeddings (m, D) of all ranks, in rank order. A rank may have none."""
        batch = gather_checked(self.ranks, self.dim, embeddings, labels, ids, mask)
        super().enqueue(batch.embeddings, batch.labels, batch.ids, batch.mask)

    @torch.no_grad()
    def step(self) -> None:
        """Call after `backward`: updates the rows with the sum of all ranks' gradients, identically on each."""
        if self.update == "backprop":
            gradient = torch.zeros_like(self.rows) if self.rows.grad is None else self.rows.grad
            self.rows.grad = self.ranks.sum(gradient, "gradient of the rows")
        super().step()


class ShardedMemory(nn.Module):
    """A memory of M rows of which each of R ranks holds M/R. Use it like `CrossBatchMemory`, with the same calls on all ranks.

    Pass it to `GlobalLoss`. Rows take the same slots as in a single process, so the state can be saved under one number of
    ranks and loaded under another. In a keyed memory an instance is stored on rank id mod R.

    Args:
        size: M, of all ranks together.

    The other arguments are those of `CrossBatchMemory`.

    Example:
        >>> memory = ShardedMemory(size=3, dim=2)
        >>> memory.enqueue(torch.eye(2), torch.tensor([7, 8]), ids=torch.tensor([0, 1]))
        >>> len(memory), memory.shard.labels.tolist()
        (2, [7, 8])
    """

    pointer: Tensor
    count: Tensor
    clock: Tensor
    latest: Tensor
    unsound: Tensor

    def __init__(
        self, size: int, dim: int, update: str = "queue", *, ranks: Ranks | None = None, **options: Unpack[MemoryOptions]
    ) -> None:
        super().__init__()
        self.ranks = the_ranks() if ranks is None else ranks
        rows = plain_integer(size)
        if rows is None or rows < self.ranks.world:
            raise InputError(f"size must be an integer, at least the number of processes, {self.ranks.world}, got {size!r}")
        local = -(-(rows - self.ranks.rank) // self.ranks.world)
        self.shard = CrossBatchMemory(local, dim, update, **options)
        self.size, self.dim, self.update = rows, self.shard.dim, update
        for name in COUNTERS:
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=self.shard.rows.device))

    # ---------------------------------------------------------------- writing

    @torch.no_grad()
    def enqueue(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Writes the embeddings (m, D) of all ranks, in rank order, each row on the rank of its slot."""
        batch = gather_checked(self.ranks, self.dim, embeddings, labels, ids, mask)
        assert batch.ids is not None
        if len(batch.labels) == 0:
            return
        R, keyed = self.ranks.world, self.update != "queue"
        wanted = torch.ones_like(batch.labels, dtype=torch.bool) if batch.mask is None else batch.mask
        keep = sound_rows(batch.embeddings, wanted, batch.ids, self.size if keyed else 0)  # raises on every rank or on none
        kept = keep.sum()
        slots = batch.ids if keyed else (self.pointer + keep.cumsum(0) - 1) % self.size
        mine = keep & (slots % R == self.ranks.rank)
        self.shard.clock.copy_(self.clock)  # rows are stamped with the clock of the whole memory
        self.shard.enqueue(batch.embeddings, batch.labels, batch.ids // R if keyed else batch.ids, mine)
        self.unsound += (wanted & ~keep).sum()
        self.clock += keep.any()
        self.shard.clock.copy_(self.clock)
        if keyed:
            self.count.copy_(self.ranks.sum(self.shard.count, "count"))
        else:
            self.latest.copy_(torch.where(keep.any(), kept, self.latest))
            self.pointer.copy_((self.pointer + kept) % self.size)
            self.count.copy_((self.count + kept).clamp(max=self.size))

    def step(self) -> None:
        """Call after `backward` with update="backprop": each rank updates its own rows, whose gradient is complete."""
        self.shard.step()

    @torch.no_grad()
    def clear(self) -> None:
        self.shard.clear()
        for name in COUNTERS:
            self.get_buffer(name).zero_()

    def fill(self, model: nn.Module, loader: Iterable) -> None:
        """As `CrossBatchMemory.fill`; the loader of each rank yields its part of the same batches."""
        fill_from(self, model, loader)

    # ---------------------------------------------------------------- reading

    @property
    def rows(self) -> Tensor:
        """(M/R, D): the rows of this rank."""
        return self.shard.rows

    def __len__(self) -> int:
        return int(self.count)

    def __bool__(self) -> bool:
        return True

    @property
    def is_full(self) -> bool:
        return len(self) == self.size

    @property
    def embeddings(self) -> Tensor:
        """The filled rows of this rank, as are the labels, ids and ages below."""
        return self.shard.embeddings

    @property
    def labels(self) -> Tensor:
        return self.shard.labels

    @property
    def ids(self) -> Tensor:
        return self.global_ids(self.shard.ids)

    @property
    def ages(self) -> Tensor:
        return self.shard.ages

    def check(self) -> None:
        """Raises InputError if bad rows were skipped on a device where `enqueue` could not raise."""
        self.shard.unsound.copy_(self.unsound)
        self.shard.check()

    def own_slots(self, ids: Tensor) -> Tensor:
        """(m,): the local slot of the newest row with each id, -1 if it is on another rank or does not exist."""
        R, rank = self.ranks.world, self.ranks.rank
        if self.update != "queue":
            return torch.where(ids % R == rank, self.shard.latest_copies(ids // R), -1)
        local = self.shard.latest_copies(ids)
        recency = torch.where(local >= 0, (local * R + rank - self.pointer) % self.size, -1)
        newest = self.ranks.maximum(recency, "newest copies")
        return torch.where(recency == newest, local, -1)

    # ---------------------------------------------------------------- state

    def global_ids(self, local: Tensor) -> Tensor:
        if self.update == "queue":
            return local
        return torch.where(local >= 0, local * self.ranks.world + self.ranks.rank, -1)

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns on rank 0 the state that a `CrossBatchMemory` of all rows would have, on the CPU, and {} elsewhere.

        All ranks must call it, without arguments.

        Raises:
            InputError: it was called by the state_dict of a module that contains the memory.
        """
        if args or kwargs:
            raise InputError("keep a sharded memory outside the model and call its own state_dict()")
        R, state = self.ranks.world, {name: self.get_buffer(name).clone() for name in COUNTERS}
        longest = -(-self.size // R)
        for name in ROWS:
            local = self.shard.get_buffer(name).detach()
            if name == "row_ids":
                local = self.global_ids(local)
            whole = torch.empty((longest, R, *local.shape[1:]) if self.ranks.first else 0, dtype=local.dtype)
            for start in range(0, longest, BLOCK):
                stop = min(start + BLOCK, longest)
                parts = self.ranks.to_first(padded(local[start:stop], stop - start))
                if parts is not None:
                    whole[start:stop] = parts.transpose(0, 1).cpu()
            state[name] = whole.flatten(0, 1)[: self.size].clone() if self.ranks.first else whole
        return state if self.ranks.first else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of all rows, saved under any number of ranks; each rank keeps its own rows."""
        state = state_dict
        if state["rows"].shape != (self.size, self.dim):
            raise InputError(f"the state has rows of shape {tuple(state['rows'].shape)}, this memory {(self.size, self.dim)}")
        check_state(self.update, state)
        R, rank = self.ranks.world, self.ranks.rank
        for name in COUNTERS:
            self.get_buffer(name).copy_(state[name])
        for name in ROWS:
            mine = state[name][rank::R]
            if name == "row_ids" and self.update != "queue":
                mine = torch.where(mine >= 0, mine // R, -1)
            self.shard.get_buffer(name).copy_(mine)
        self.shard.clock.copy_(self.clock)
        self.shard.count.copy_((self.shard.stamps >= 0).sum())
        self.shard.pointer.copy_(((self.pointer - rank + R - 1) // R) % self.shard.size)

    def extra_repr(self) -> str:
        return f"size={self.size}, rank={self.ranks.rank} of {self.ranks.world}"
