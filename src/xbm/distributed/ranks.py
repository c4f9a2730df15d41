"""The processes of a run and the few exchanges between them, each counted in bytes. With one process they do nothing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from xbm.errors import LostPeerError


class Ranks:
    """The ranks of torch.distributed's default group, as they are when this is made; one rank where there is no group.

    Every rank makes the same calls in the same order. On GPUs the group needs a backend for both devices, as in
    `init_process_group("cpu:gloo,cuda:nccl")`: sizes travel between the hosts, so that no GPU is waited for.

    Attributes:
        rank, world: which process this is, of how many.
        sent: bytes that this rank has sent so far, by what for. Counted as ring algorithms send them: an all-gather of b bytes
            a rank (R − 1)·b, an all-reduce of b bytes 2·b·(R − 1)/R, a reduce-scatter of b bytes b·(R − 1)/R.

    Example:
        >>> ranks = Ranks()  # no process group here
        >>> ranks.rank, ranks.world, ranks.sum(torch.ones(2), "an example").tolist(), dict(ranks.sent)
        (0, 1, [1.0, 1.0], {})
    """

    def __init__(self) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if started else 0
        self.world = dist.get_world_size() if started else 1
        self.sent: Counter[str] = Counter()
        self.kept: object = None  # the latest gather, see `gather.py`

    @classmethod
    def alone(cls) -> "Ranks":
        """A single process, even if a process group exists."""
        ranks = cls()
        ranks.rank, ranks.world = 0, 1
        return ranks

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0

    def sum(self, x: Tensor, why: str) -> Tensor:
        """Elementwise over the ranks; the same bits on each."""
        return self._reduced(x, dist.ReduceOp.SUM, why)

    def maximum(self, x: Tensor, why: str) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX, why)

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType, why: str) -> Tensor:
        if self.world == 1 or x.numel() == 0:
            return x
        total = x.contiguous().clone()
        with lost_touch_told():
            dist.all_reduce(total, how)
        self.sent[why] += 2 * total.nbytes * (self.world - 1) // self.world
        return total

    def stack(self, x: Tensor, why: str) -> Tensor:
        """(R, ...): the ranks' tensors, all of the same shape."""
        if self.world == 1:
            return x[None]
        x = x.contiguous()
        stacked = x.new_empty((self.world, *x.shape))
        if x.numel():
            with lost_touch_told():
                dist.all_gather_into_tensor(stacked.view(-1), x.view(-1))
        self.sent[why] += x.nbytes * (self.world - 1)
        return stacked

    def everyone(self, x: Tensor, why: str) -> list[Tensor]:
        """The ranks' tensors, whose first dimensions may differ."""
        if self.world == 1:
            return [x]
        sizes = self.stack(torch.tensor([len(x)]), f"{why}: sizes").flatten().tolist()
        return [part[:size] for part, size in zip(self.stack(padded(x, max(sizes)), why), sizes)]

    def scattered_sum(self, parts: Tensor, why: str) -> Tensor:
        """parts (R, n, ...): the sum over the ranks of what each has for this one.  # (n, ...)"""
        if self.world == 1:
            return parts[0]
        mine = torch.empty_like(parts[0])
        if mine.numel():
            with lost_touch_told():
                dist.reduce_scatter_tensor(mine.view(-1), parts.contiguous().view(-1))
        self.sent[why] += parts.nbytes * (self.world - 1) // self.world
        return mine

    def to_first(self, x: Tensor) -> Tensor | None:
        """(R, ...) on rank 0, None elsewhere; all of the same shape."""
        if self.world == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.world)] if self.first else None
        with lost_touch_told():
            dist.gather(x.contiguous(), parts, dst=0)
        return torch.stack(parts) if parts is not None else None

    def agreed(self, value: str) -> str:
        """What rank 0 says."""
        if self.world == 1:
            return value
        said = [value]
        with lost_touch_told():
            dist.broadcast_object_list(said, src=0)
        return said[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            with lost_touch_told():
                dist.all_reduce(torch.zeros(1))


@lru_cache(maxsize=1)
def _the_ranks(rank: int, world: int) -> Ranks:
    return Ranks()


def the_ranks() -> Ranks:
    """The ranks that memories and losses share unless told otherwise, so that one gather serves them all."""
    now = Ranks()
    return _the_ranks(now.rank, now.world)


def padded(x: Tensor, length: int) -> Tensor:
    """With rows of zeros up to `length`."""
    return x if len(x) == length else torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))])


@contextmanager
def lost_touch_told() -> Iterator[None]:
    """Turns the failure of an exchange into `LostPeerError`.

    gloo reports a closed connection as a plain RuntimeError and NCCL as a DistError. Subclasses of RuntimeError with a meaning
    of their own, such as out of memory, pass through.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise LostPeerError(first_line if len(first_line) <= 160 else first_line[:160] + "...") from error
