"""The memory: a bank of past embeddings with labels, instance ids and ages. All state is in registered buffers.

    queue            first in, first out: the newest M embeddings of any images (the paper, section 3.3)
    moving_average   slot = instance id:  v ← normalize(m·v + (1−m)·v_new)            (supplementary, section 2)
    backprop         slot = instance id:  as above, and memory.step() descends:  v ← normalize(v − α ∂L/∂v)

Nothing here synchronizes with the device, except the accessors documented to do so. Nothing is locked, which compiled code
cannot do: threads that enqueue to the same memory must take turns, or rows are lost.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm.checks import check_device, check_embeddings, check_integers, check_state, plain_integer, sound_rows
from xbm.errors import InputError, unknown
from xbm.kernels import has_kernels

__all__ = ["UPDATES", "CrossBatchMemory", "statistics_kept"]

UPDATES = ("queue", "moving_average", "backprop")
PER_ROW = ("row_labels", "row_ids", "stamps")  # buffers with one integer per slot
COUNTERS = ("pointer", "count", "clock", "latest", "unsound")  # buffers with one integer
STORAGE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CrossBatchMemory(nn.Module):
    """Stores embeddings of past batches, to be used as positives and negatives for the current anchors.

    Args:
        size: M, the number of slots. For the keyed updates: the number of instances, 0 ≤ id < size.
        dim: D, the length of an embedding.
        update: "queue", "moving_average" or "backprop".
        dtype: storage type of the rows: float64, float32, bfloat16 or float16.
        momentum: m of the keyed updates; by default 0.9 for "moving_average" and 0 (overwrite) for "backprop".
        alpha: α of "backprop". A negative value gives gradient ascent, as printed in the paper's supplementary.

    Example:
        >>> memory = CrossBatchMemory(size=3, dim=2)
        >>> memory.enqueue(torch.eye(2), torch.tensor([7, 8]))
        >>> memory.enqueue(torch.eye(2), torch.tensor([9, 10]))
        >>> len(memory), memory.is_full, memory.labels.tolist(), memory.ages.tolist()
        (3, True, [8, 9, 10], [1, 0, 0])
    """

    rows: Tensor  # (M, D), unit rows; meaningless where never written
    row_labels: Tensor  # (M,)
    row_ids: Tensor  # (M,), -1 where enqueued without ids
    stamps: Tensor  # (M,), the enqueue call that wrote the row; -1: never written, -2: ignored
    pointer: Tensor  # (), the queue's next slot
    count: Tensor  # (), rows in use
    clock: Tensor  # (), enqueue calls so far
    latest: Tensor  # (), rows of the latest enqueue call
    unsound: Tensor  # (), invalid rows that were skipped on a device where `enqueue` cannot raise

    def __init__(
        self,
        size: int,
        dim: int,
        update: str = "queue",
        *,
        dtype: torch.dtype = torch.float32,
        momentum: float | None = None,
        alpha: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if update not in UPDATES:
            raise unknown("update", update, UPDATES)
        given, (size, dim) = (size, dim), (plain_integer(each) or 0 for each in (size, dim))
        if size < 1 or dim < 1:
            raise InputError(f"size and dim must be positive integers, got {given[0]!r} and {given[1]!r}")
        if dtype not in STORAGE:
            raise InputError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        if momentum is None:
            momentum = 0.9 if update == "moving_average" else 0.0
        if not (0 <= momentum < 1 and math.isfinite(alpha)):
            raise InputError(f"momentum must satisfy 0 ≤ m < 1 and alpha must be finite, got {momentum} and {alpha}")
        self.size, self.dim, self.update, self.momentum, self.alpha = size, dim, update, momentum, alpha

        self.register_buffer("rows", _allocate(size, dim, dtype, device))
        for name in PER_ROW:
            self.register_buffer(name, torch.full((size,), -1, dtype=torch.int64, device=device))
        for name in COUNTERS:
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        self.rows.requires_grad_(update == "backprop")

    def _apply(self, fn: Callable, recurse: bool = True) -> "CrossBatchMemory":
        with torch.no_grad():  # .to() must leave the rows a leaf, or their gradient would be lost
            super()._apply(fn, recurse)
        self.rows.requires_grad_(self.update == "backprop")
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        check_state(self.update, state_dict, prefix, self.rows.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # ---------------------------------------------------------------- writing

    @torch.no_grad()
    def enqueue(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Writes embeddings (m, D) with their labels (m,) and instance ids (m,); with `mask` (m,) only the rows marked True.

        Raises:
            InputError: if an argument is invalid; the memory is then unchanged.
        """
        check_embeddings(embeddings, "embeddings", self.dim)
        check_device(embeddings, "the embeddings", self.rows, "the memory")
        labels = check_integers(labels, "labels", embeddings)
        if ids is not None:
            ids = check_integers(ids, "ids", embeddings)
        elif self.update != "queue":
            raise InputError(f"update={self.update!r} keeps one slot per instance: pass ids to enqueue")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != labels.shape):
            raise InputError(f"mask must be {len(labels)} booleans, got {mask.dtype} of shape {tuple(mask.shape)}")
        if len(labels) == 0:
            return

        if has_kernels(self.rows.device) and self._enqueue_by_kernel(embeddings, labels, ids, mask):
            return
        if mask is None:
            mask = torch.ones_like(labels, dtype=torch.bool)
        keep = sound_rows(embeddings, mask, ids, 0 if self.update == "queue" else self.size)
        self.unsound += (mask & ~keep).sum()
        self.clock += keep.any()
        if self.update == "queue":
            ids = torch.full_like(labels, -1) if ids is None else ids
            self.latest.copy_(torch.where(keep.any(), keep.sum(), self.latest))
            # A batch larger than the memory is written in parts, so that no part overwrites itself.
            for part in range(0, len(labels), self.size):
                cut = slice(part, part + self.size)
                self._append(embeddings[cut], labels[cut], ids[cut], keep[cut])
        else:
            assert ids is not None
            self._assign(embeddings, labels, ids, keep)

    def _enqueue_by_kernel(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None, mask: Tensor | None) -> bool:
        """Enqueues with one or two kernel launches instead of dozens; returns False if there is no kernel for this case."""
        from xbm.engine import triton

        given, where = (embeddings, labels, ids, mask), (self.row_labels, self.row_ids, self.stamps)
        if self.update == "queue":
            triton.enqueue(*given, self.rows, *where, self.pointer, self.count, self.clock, self.latest, self.unsound)
        elif torch.float64 in (embeddings.dtype, self.rows.dtype) or torch.compiler.is_compiling():
            return False
        else:
            triton.assign(*given, self.rows.detach(), *where, self.count, self.clock, self.unsound, self.momentum)
        return True

    def _append(self, embeddings: Tensor, labels: Tensor, ids: Tensor, keep: Tensor) -> None:
        """Writes the kept rows to the next slots. The others get the slots after those and write back what is there."""
        kept = keep.sum()
        place = torch.where(keep, keep.cumsum(0) - 1, kept + (~keep).cumsum(0) - 1)
        slots = (self.pointer + place) % self.size
        self._write(slots, keep, embeddings, labels, ids)
        self.pointer.copy_((self.pointer + kept) % self.size)
        self.count.copy_((self.count + kept).clamp(max=self.size))

    def _assign(self, embeddings: Tensor, labels: Tensor, ids: Tensor, keep: Tensor) -> None:
        """Writes each row to the slot of its id. Rows with the same id all write the last kept value, in any order."""
        position = torch.arange(len(ids), device=ids.device)
        winner = torch.where((ids[:, None] == ids) & keep, position, -1).amax(1)  # (m,)
        winner = torch.where(winner >= 0, winner, winner.amax())  # a masked row repeats the write of another one
        any_kept, winner = winner >= 0, winner.clamp(min=0)
        slots = ids[winner].clamp(0, self.size - 1)
        new = embeddings[winner].to(torch.promote_types(embeddings.dtype, torch.float32))
        if self.momentum > 0:
            mixed = F.normalize(self.momentum * self.rows[slots].to(new.dtype) + (1 - self.momentum) * new, dim=1)
            new = torch.where((self.stamps[slots] >= 0)[:, None], mixed, new)
        self._write(slots, any_kept, new, labels[winner], ids[winner])
        self.count.copy_((self.stamps >= 0).sum())

    def _write(self, slots: Tensor, keep: Tensor, embeddings: Tensor, labels: Tensor, ids: Tensor) -> None:
        rows = torch.where(keep[:, None], embeddings.to(self.rows.dtype), self.rows[slots])
        self.rows.index_copy_(0, slots, rows)
        for buffer, new in ((self.row_labels, labels), (self.row_ids, ids), (self.stamps, self.clock)):
            buffer.index_copy_(0, slots, torch.where(keep, new, buffer[slots]))

    @torch.no_grad()
    def step(self) -> None:
        """Call after `backward`: v ← normalize(v − α ∂L/∂v) for update="backprop"; does nothing for the other updates.

        A row without a gradient does not change. With a GradScaler, divide `memory.rows.grad` by the scale first.
        """
        if self.rows.grad is None:
            return
        if has_kernels(self.rows.device) and self.rows.dtype != torch.float64 and not torch.compiler.is_compiling():
            from xbm.engine import triton

            triton.descend(self.rows.detach(), self.rows.grad, self.alpha)
            self.rows.grad = None
            return
        for rows, gradient in zip(self.rows.split(8192), self.rows.grad.split(8192)):
            wide = torch.promote_types(rows.dtype, torch.float32)
            moved = F.normalize(rows.to(wide) - self.alpha * gradient.to(wide), dim=1)
            rows.copy_(torch.where((gradient != 0).any(1, keepdim=True), moved.to(rows.dtype), rows))
        self.rows.grad = None

    @torch.no_grad()
    def clear(self) -> None:
        """Empties the memory."""
        for name in PER_ROW:
            self.get_buffer(name).fill_(-1)
        for name in ("rows", *COUNTERS):
            self.get_buffer(name).zero_()

    @torch.no_grad()
    def fill(self, model: nn.Module, loader: Iterable) -> None:
        """Clears the memory, then enqueues the embeddings of (images, labels, ids) until it is full.

        The model runs in train mode, as it does for the rows that follow; its batch-norm statistics are restored.
        """
        fill_from(self, model, loader)

    # ---------------------------------------------------------------- reading

    def __bool__(self) -> bool:
        return True  # an empty memory is still a memory

    def __len__(self) -> int:
        return int(self.count)

    @property
    def is_full(self) -> bool:
        """Whether every row was written; ignored rows count as written."""
        return len(self) == self.size if self.update == "queue" else not bool((self.stamps == -1).any())

    @property
    def embeddings(self) -> Tensor:
        """(len, D): the filled rows, oldest first for a queue, by id otherwise. May wait for the device, like those below."""
        return self.rows.detach()[self._filled()]

    @property
    def labels(self) -> Tensor:
        return self.row_labels[self._filled()]

    @property
    def ids(self) -> Tensor:
        """(len,): instance ids, -1 where a row was enqueued without one."""
        return self.row_ids[self._filled()]

    @property
    def ages(self) -> Tensor:
        """(len,): enqueue calls since the row was written; 0 for the newest."""
        return self.clock - self.stamps[self._filled()]

    def _filled(self) -> Tensor:
        if self.update != "queue" or not self.is_full:
            return (self.stamps >= 0).nonzero()[:, 0]
        return (self.pointer + torch.arange(self.size, device=self.pointer.device)) % self.size

    def check(self) -> None:
        """Raises InputError if bad rows were skipped on a device where `enqueue` could not raise."""
        if bad := int(self.unsound):
            raise InputError(
                f"{bad} rows were not written to the memory: not finite, not of unit length, or an id outside 0 ≤ id < size"
            )

    # ---------------------------------------------------------------- which rows are the anchors themselves

    def latest_slots(self, m: int) -> Tensor:
        """(m,): the slots that the latest enqueue wrote, if it had m rows; -1 where they were overwritten since."""
        back = m - torch.arange(m, device=self.pointer.device)  # how many rows ago
        return torch.where(back <= self.size, (self.pointer - back) % self.size, -1)

    def latest_copies(self, ids: Tensor) -> Tensor:
        """(m,): the slot of the newest row with each id, -1 where there is none."""
        if self.update != "queue":
            inside = (ids >= 0) & (ids < self.size)
            slots = ids.clamp(0, self.size - 1)
            return torch.where(inside & (self.stamps[slots] >= 0), slots, -1)
        given = (ids, self.row_ids, self.stamps, self.pointer)
        if has_kernels(ids.device) and not torch.compiler.is_compiling():
            from xbm.engine import triton

            return triton.newest_copies(*given)
        return newest_copies(*given)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, update={self.update!r}, dtype={self.rows.dtype}"


def _allocate(size: int, dim: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    try:
        return torch.zeros(size, dim, dtype=dtype, device=device)
    except RuntimeError as error:
        # on a CPU, torch reports a lack of memory as a plain RuntimeError
        if type(error) is not RuntimeError or not str(device or "cpu").startswith("cpu"):
            raise
        raise MemoryError(f"a memory of {size} × {dim} {dtype} does not fit") from error


class Fillable(Protocol):
    """What `fill_from` needs from a memory."""

    @property
    def rows(self) -> Tensor: ...
    @property
    def is_full(self) -> bool: ...
    def clear(self) -> None: ...
    def enqueue(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None) -> None: ...


def fill_from(memory: Fillable, model: nn.Module, loader: Iterable) -> None:
    """`CrossBatchMemory.fill`, for any memory."""
    memory.clear()
    device = memory.rows.device
    with statistics_kept(model):
        for images, labels, ids in loader:
            memory.enqueue(model(images.to(device)), labels.to(device), None if ids is None else ids.to(device))
            if memory.is_full:
                break


@contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """Runs a model in train mode without gradients and restores its mode and batch-norm statistics afterwards."""
    was_training, buffers = model.training, {name: b.clone() for name, b in model.named_buffers()}
    model.train()
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        model.train(was_training)


@torch.library.custom_op("xbm::newest_copies", mutates_args=())
def newest_copies(ids: Tensor, row_ids: Tensor, stamps: Tensor, pointer: Tensor) -> Tensor:
    """(m,): the slot that a queue wrote last among those with each id, -1 where there is none."""
    size = len(row_ids)
    newest = torch.full_like(ids, -1)
    if ids.device.type == "cpu":  # look up only the few rows whose id occurs in the batch
        distinct, inverse = ids.unique(return_inverse=True)
        nearest = torch.searchsorted(distinct, row_ids).clamp(max=len(distinct) - 1) if len(ids) else row_ids
        slots = ((distinct[nearest] == row_ids) & (stamps >= 0)).nonzero()[:, 0] if len(ids) else row_ids[:0]
        recency = (slots - pointer) % size  # the slot before the pointer was written last
        by_id = torch.full_like(distinct, -1).scatter_reduce(0, nearest[slots], recency, "amax")
        newest = by_id[inverse]
    elif has_kernels(ids.device):
        from xbm.engine import triton

        return triton.newest_copies(ids, row_ids, stamps, pointer)
    else:
        for start in range(0, size, 4096):
            slots = torch.arange(start, min(start + 4096, size), device=ids.device)
            match = (row_ids[slots] == ids[:, None]) & (stamps[slots] >= 0)
            newest = torch.maximum(newest, torch.where(match, (slots - pointer) % size, -1).amax(1))
    return torch.where(newest >= 0, (newest + pointer) % size, -1)


@newest_copies.register_fake
def _(ids: Tensor, row_ids: Tensor, stamps: Tensor, pointer: Tensor) -> Tensor:
    return torch.empty_like(ids)
