"""The processes of a run: how they join and end, what they send each other (counted in bytes), and the gather of a batch.

With one process nothing is sent. `together` joins the processes that torchrun started into one group, and ends them cleanly,
even if one of them dies: a heartbeat detects a rank that died, froze or cannot be reached, and ends this process with one line
instead of waiting for it. Each rank increments a counter in the store of the group and watches that of the next rank. If that
stops, it says so in the store, where all ranks look. A rank that ends with an error leaves its message there.
"""

import os
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from threading import Event, Thread
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Its functions take the current default group as a default argument. Imported later, as parts of torch do, they would keep our
# group and its threads alive until the interpreter exits.
import torch.distributed.nn
from torch import Tensor

from xbm.checks import check_embeddings, check_integers
from xbm.errors import InputError, LostPeerError, TerminatedError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

PERIOD = 2.0  # seconds between two heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a rank counts as lost
GRACE = 5.0  # seconds in which the main thread may notice by itself, through a failed exchange
TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets besides the number of processes
REASON, BEAT = "xbm/reason", "xbm/beat"  # keys in the store


class Ranks:
    """The ranks of torch.distributed's default group at the time of construction; one rank if there is no group.

    Every rank must make the same calls in the same order. On GPUs the group needs a backend for both devices, as in
    `init_process_group("cpu:gloo,cuda:nccl")`: sizes are exchanged between the hosts, without waiting for a GPU.

    Attributes:
        rank: index of this process.
        world: number of processes.
        sent: bytes that this rank has sent so far, by purpose. They are counted as for ring algorithms: (R − 1)·b for an
            all-gather of b bytes per rank, 2·b·(R − 1)/R for an all-reduce and b·(R − 1)/R for a reduce-scatter of b bytes.

    Example:
        >>> ranks = Ranks()  # no process group here
        >>> ranks.rank, ranks.world, ranks.sum(torch.ones(2), "an example").tolist(), dict(ranks.sent)
        (0, 1, [1.0, 1.0], {})
    """

    def __init__(self) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialized else 0
        self.world = dist.get_world_size() if initialized else 1
        self.sent: Counter[str] = Counter()
        self._latest_gather: tuple[tuple, tuple, Gathered] | None = None  # key, arguments and result, see `gather`

    @classmethod
    def alone(cls) -> "Ranks":
        """A single process, even if a process group exists."""
        ranks = cls()
        ranks.rank, ranks.world = 0, 1
        return ranks

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def sum(self, x: Tensor, why: str) -> Tensor:
        """Elementwise sum over the ranks, identical on each."""
        return self._all_reduce(x, dist.ReduceOp.SUM, why)

    def maximum(self, x: Tensor, why: str) -> Tensor:
        """Elementwise maximum over the ranks."""
        return self._all_reduce(x, dist.ReduceOp.MAX, why)

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType, why: str) -> Tensor:
        if self.world == 1 or x.numel() == 0:
            return x
        total = x.contiguous().clone()
        communicate(dist.all_reduce, total, op)
        self.sent[why] += 2 * total.nbytes * (self.world - 1) // self.world
        return total

    def stack(self, x: Tensor, why: str) -> Tensor:
        """(R, ...): the tensors of all ranks, which must have the same shape."""
        if self.world == 1:
            return x[None]
        x = x.contiguous()
        stacked = x.new_empty((self.world, *x.shape))
        if x.numel():
            communicate(dist.all_gather_into_tensor, stacked.view(-1), x.view(-1))
        self.sent[why] += x.nbytes * (self.world - 1)
        return stacked

    def everyone(self, x: Tensor, why: str) -> list[Tensor]:
        """The tensors of all ranks, whose first dimensions may differ."""
        if self.world == 1:
            return [x]
        sizes = self.stack(torch.tensor([len(x)]), f"{why}: sizes").flatten().tolist()
        return [part[:size] for part, size in zip(self.stack(padded(x, max(sizes)), why), sizes)]

    def scattered_sum(self, parts: Tensor, why: str) -> Tensor:
        """(n, ...): the sum over the ranks of their `parts[rank]`, where parts is (R, n, ...)."""
        if self.world == 1:
            return parts[0]
        mine = torch.empty_like(parts[0])
        if mine.numel():
            communicate(dist.reduce_scatter_tensor, mine.view(-1), parts.contiguous().view(-1))
        self.sent[why] += parts.nbytes * (self.world - 1) // self.world
        return mine

    def to_first(self, x: Tensor) -> Tensor | None:
        """(R, ...) on rank 0, None elsewhere. All ranks must pass the same shape."""
        if self.world == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.world)] if self.first else None
        communicate(dist.gather, x.contiguous(), parts, 0)
        return torch.stack(parts) if parts is not None else None

    def agreed(self, value: str) -> str:
        """Returns the value of rank 0."""
        if self.world == 1:
            return value
        text = torch.tensor(list(value.encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        communicate(dist.broadcast, length, 0)
        text.resize_(int(length))
        if len(text):
            communicate(dist.broadcast, text, 0)
        return bytes(text.tolist()).decode()

    def wait(self) -> None:
        """Waits until all ranks have called this."""
        if self.world > 1:
            communicate(dist.all_reduce, torch.zeros(1))


@lru_cache(maxsize=1)
def _the_ranks(rank: int, world: int) -> Ranks:
    return Ranks()


def the_ranks() -> Ranks:
    """Returns the ranks that memories and losses share by default, so that one gather serves all of them.

    Example:
        >>> the_ranks() is the_ranks(), the_ranks().first
        (True, True)
    """
    now = Ranks()
    return _the_ranks(now.rank, now.world)


def padded(x: Tensor, length: int) -> Tensor:
    """Appends rows of zeros up to `length`."""
    return x if len(x) == length else torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))])


def communicate(collective: Callable[..., Any], *arguments: Any) -> None:
    """Runs a collective of torch.distributed and waits for it.

    NCCL and the stores report a lost connection as `DistError`; gloo raises a plain RuntimeError. gloo checks its arguments
    when a collective starts, so a plain RuntimeError while waiting for it comes from the connection. Everything else,
    including out of memory, passes through.

    Raises:
        LostPeerError: the connection to another rank failed or timed out.
    """
    work = None
    try:
        work = collective(*arguments, async_op=True)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or (work is not None and type(error) is RuntimeError):
            raise LostPeerError(textwrap.shorten(str(error), 160, placeholder="...")) from error
        raise


# ---------------------------------------------------------------- the global batch


class Gathered(NamedTuple):
    """A global batch of m rows, identical on every rank.

    Example:
        >>> batch = gather(Ranks.alone(), torch.eye(3), torch.tensor([0, 0, 1]))
        >>> batch.sizes, batch.mine
        ((3,), slice(0, 3, None))
    """

    embeddings: Tensor  # (m, D), without gradient
    labels: Tensor  # (m,)
    ids: Tensor | None  # (m,)
    mask: Tensor | None  # (m,)
    sizes: tuple[int, ...]  # rows of each rank
    mine: slice  # this rank's rows


def gather(ranks: Ranks, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Gathered:
    """Gathers the rows of all ranks, in rank order. Ranks may have different numbers of rows, or none.

    The latest result is kept. Asking for the same tensors again (for the loss of the batch, the memory, and the loss against
    the memory) sends nothing. All ranks run the same program, so they agree on when that is the case.

    Raises:
        InputError: the embeddings of the ranks differ in width or type; raised on every rank.

    Example:
        >>> batch = gather(the_ranks(), torch.eye(3), torch.tensor([0, 0, 1]))
        >>> batch.labels.tolist()  # of all ranks; here there is one
        [0, 0, 1]
    """
    arguments = (embeddings.detach(), labels, ids, mask)
    key = tuple(_identity(x) for x in arguments)
    if ranks._latest_gather is not None and ranks._latest_gather[0] == key:
        return ranks._latest_gather[2]
    batch = _gather(ranks, *arguments)
    ranks._latest_gather = (key, arguments, batch)  # the arguments stay alive, or another tensor could take their address
    return batch


def gather_checked(
    ranks: Ranks, dim: int, embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None
) -> Gathered:
    """`gather` for the arguments of `enqueue` of a memory with `dim` columns."""
    check_embeddings(embeddings, "embeddings", dim)
    labels, ids = check_integers(labels, "labels", embeddings), check_integers(require_ids(ids), "ids", embeddings)
    return gather(ranks, embeddings, labels, ids, mask)


def require_ids(ids: Tensor | None) -> Tensor:
    """Refuses None: a rank sees only its part of a batch, so it cannot find an anchor's own copy by position."""
    if ids is None:
        raise InputError("ids are required with several processes, to exclude each anchor's own row: pass ids")
    return ids


def batch_sizes(ranks: Ranks, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> tuple[int, ...]:
    """The number of rows of each rank, from the latest gather if it was of these tensors."""
    if ranks._latest_gather is not None:
        key, _, batch = ranks._latest_gather
        if key[:3] == tuple(_identity(x) for x in (embeddings.detach(), labels, ids)):
            return batch.sizes
    return tuple(ranks.stack(torch.tensor([len(embeddings)]), "sizes").flatten().tolist())


def _gather(ranks: Ranks, embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None) -> Gathered:
    m, dim = embeddings.shape
    if ranks.world == 1:
        return Gathered(embeddings, labels, ids, mask, (m,), slice(0, m))
    header = [m, dim, DTYPES.index(embeddings.dtype), ids is not None, mask is not None]
    table = ranks.stack(torch.tensor(header), "sizes")  # (R, 5)
    if not bool((table[:, 1:] == table[0, 1:]).all()):
        raise InputError(
            "the batches of the ranks do not match: pass embeddings of the same width and type, and ids and mask on all or none"
        )
    sizes = table[:, 0].tolist()
    # Everything is sent as one block of bytes: one exchange instead of four.
    integers = [x.long() for x in (labels, ids, mask) if x is not None]
    block = torch.cat([_bytes(embeddings), *(_bytes(x[:, None]) for x in integers)], dim=1)
    blocks = ranks.stack(padded(block, max(sizes)), "batch")
    block = torch.cat([part[:size] for part, size in zip(blocks, sizes)])
    width = dim * embeddings.element_size()
    rows = block[:, :width].contiguous().view(embeddings.dtype)
    columns = iter(block[:, width:].contiguous().view(torch.int64).T.contiguous().unbind())
    keys = next(columns), None if ids is None else next(columns), None if mask is None else next(columns).bool()
    start = sum(sizes[: ranks.rank])
    return Gathered(rows, *keys, tuple(sizes), slice(start, start + m))


def _bytes(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.view(torch.uint8) if x.numel() else x.new_empty((len(x), x.shape[1] * x.element_size()), dtype=torch.uint8)


def _identity(x: Tensor | None) -> tuple | None:
    """Equal for tensors that share the same unmodified memory; empty tensors have a storage too."""
    if x is None:
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.dtype, x._version


# ------------------------------------------------------------------ joining and ending


@contextmanager
def together(device: str = "auto") -> Iterator[Ranks]:
    """Yields the ranks of this run: one, unless torchrun started several. On GPUs each rank uses the GPU of its local rank.

    Example:
        >>> with together() as ranks:
        ...     ranks.world
        1
    """
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if not dist.is_initialized() and size != "1" and (missing or not size.isdecimal()):
        unset = f"{' and '.join(missing)} not set" if missing else "not a number"
        raise InputError(f"WORLD_SIZE is {size!r} in the environment, but {unset}: start with torchrun, or unset WORLD_SIZE")
    world = int(size)
    if world == 1 or dist.is_initialized():
        yield the_ranks()
        return
    on_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # A long timeout, since all ranks wait for rank 0 while it writes. The heartbeat detects lost ranks much sooner.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30))
    ranks = the_ranks()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=15))
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        with Heartbeat(store, ranks.rank, world):
            yield ranks
            ranks.wait()
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second error would only hide the first
        raise
    signal.signal(signal.SIGTERM, before)
    leave()


def leave() -> None:
    """Ends this process's part in the group.

    Before torch 2.8, a group is destroyed while Python is locked, and waits for threads that may be waiting for Python to free
    the tensors of the last exchange: often both wait forever. A pause lets these threads finish.
    """
    if torch.__version__ < "2.8":  # compares versions, not text
        time.sleep(0.1)
    dist.destroy_process_group()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminatedError("this process received SIGTERM, which torchrun sends when another process has ended")


class Heartbeat:
    """Runs a thread inside a `with` block that ends this process if another rank is lost."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.next = store, rank, (rank + 1) % world
        self._done = Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(timeout=PERIOD)
        if error is not None:
            self._report(f"rank {self.rank}: {textwrap.shorten(str(error), 1000) or type(error).__name__}")

    def _report(self, reason: str) -> None:
        try:
            if not self.store.check([REASON]):  # the first rank to end knows the cause
                self.store.set(REASON, reason)
        except dist.DistError:  # without the store there is nobody to report to
            return

    def _run(self) -> None:
        beats, latest, heard = 0, b"", time.monotonic()
        while not self._done.wait(PERIOD):
            beats += 1
            try:
                self.store.set(f"{BEAT}/{self.rank}", str(beats))
                reason = self.store.get(REASON).decode() if self.store.check([REASON]) else ""
                key = f"{BEAT}/{self.next}"
                beat = self.store.get(key) if self.store.check([key]) else b""
            except dist.DistError as error:
                reason, beat = f"the store of the group is gone: {textwrap.shorten(str(error), 80)}", b""
            if beat != latest:
                latest, heard = beat, time.monotonic()
            elif not reason and time.monotonic() - heard > SILENCE:
                reason = f"rank {self.next} has been silent for {SILENCE:.0f} s"
                self._report(reason)
            if reason:
                return self._exit(reason)

    def _exit(self, reason: str) -> None:
        if not self._done.wait(GRACE):
            # One write with its newline, since other ranks write to the same terminal now.
            sys.stderr.write(f"error: {LostPeerError(reason)}\n")
            sys.stderr.flush()
            os._exit(2)
