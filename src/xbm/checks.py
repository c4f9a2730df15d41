"""Checks of what a caller passes: shapes and types raise at once, values are checked without a host sync on a GPU."""

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xbm.errors import InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_embeddings(embeddings: Tensor, what: str, dim: int | None = None) -> None:
    """Raises unless these are float rows, with `dim` columns if it is given."""
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise InputError(f"{what} must be a matrix (rows, dim), got {shape}: pass one embedding per row")
    if not embeddings.is_floating_point():
        raise InputError(f"{what} are {embeddings.dtype}: pass float embeddings of unit length")
    if dim is not None and embeddings.shape[1] != dim:
        width = embeddings.shape[1]
        raise InputError(
            f"expected {what} of dimension {dim}, got {width}: create the memory with CrossBatchMemory(dim={width})"
        )


def check_integers(values: Tensor, what: str, like: Tensor) -> Tensor:
    """Returns one integer per row of `like`, on its device, as int64."""
    if not isinstance(values, Tensor) or values.dtype not in INTEGERS:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"{what} are {kind}: pass an integer tensor")
    if values.shape != (like.shape[0],):
        raise InputError(f"{like.shape[0]} embeddings but {what} of shape {tuple(values.shape)}: pass one per row")
    check_device(values, what, like, "the embeddings")
    return values.long()


def check_device(given: Tensor, what: str, other: Tensor, where: str) -> None:
    if given.device != other.device:
        raise InputError(f"{what} are on {given.device}, {where} on {other.device}: move them with .to({other.device})")


def check_memory(memory: object) -> None:
    """Raises for what is passed in the place of a memory, such as the pairs of a miner."""
    if memory is not None and not isinstance(getattr(memory, "row_labels", None), Tensor):
        hint = ": wrap the loss in GlobalLoss" if hasattr(memory, "shard") else ""
        raise InputError(f"memory must be a CrossBatchMemory, got {type(memory).__name__}{hint}")


def plain_integer(value: Any) -> int | None:
    """A whole number as a plain int, from numpy and tensors too; None for anything else, and for booleans."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):  # an index for numpy 1
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def plain_number(name: str, value: Any, kind: type) -> float | bool:
    """The value of a hyper-parameter as a plain number: engines and kernels compute with nothing else."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.numel() != 1:
            raise InputError(f"{name} must be a plain number, got a tensor that is trained or has several elements")
        value = value.item()
    if kind is bool:
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        raise InputError(f"{name} must be True or False, got {value!r}")
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_state(update: str, state: Mapping[str, Tensor], prefix: str = "", shape: tuple[int, ...] | None = None) -> None:
    """Raises if the state of a memory has rows of another shape, if one is given, or if it is that of a queue and `update` is
    keyed, or vice versa: only a queue counts its latest rows. Slots would hold other instances than their keys, so that anchors
    meet their own copies.
    """
    rows = state.get(f"{prefix}rows")
    if rows is not None and shape is not None and rows.shape != shape:
        there, here = (f"rows of shape {tuple(each)}" for each in (rows.shape, shape))
        raise InputError(f"the state is of a memory with {there}, this one has {here}: create it with the same size and dim")
    _check_ranges(state, prefix)
    latest, clock = (state.get(f"{prefix}{name}") for name in ("latest", "clock"))
    if latest is not None and clock is not None and int(clock) > 0 and (int(latest) > 0) != (update == "queue"):
        kind = "queue" if int(latest) > 0 else "memory with one slot per instance"
        raise InputError(f"this state is that of a {kind}, not of update={update!r}: create the memory with the same update")


def _check_ranges(state: Mapping[str, Tensor], prefix: str) -> None:
    """Raises if a number in the state of a memory is one that no memory has; a wrong one would be an index out of range."""
    rows, stamps = state.get(f"{prefix}rows"), state.get(f"{prefix}stamps")
    if rows is None or rows.dim() != 2:
        return
    size = len(rows)
    for name, largest in {
        "pointer": size - 1,
        "count": size,
        "clock": math.inf,
        "latest": math.inf,
        "unsound": math.inf,
    }.items():
        value = state.get(f"{prefix}{name}")
        if value is not None and value.numel() == 1 and not 0 <= int(value) <= largest:
            raise InputError(f"the state of the memory has {name}={int(value)}, not 0 to {largest}: it is damaged")
    if stamps is not None and stamps.shape == (size,):
        length = torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
        if not bool((length.isfinite() | (stamps < 0)).all()):
            raise InputError("the state of the memory has a row with NaN or infinity: it is damaged, or of a run that diverged")


def tolerance(dtype: torch.dtype) -> float:
    """How far the length of a row may be from 1 and still count as rounding."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 1e-2


@torch.library.custom_op("xbm::sound_rows", mutates_args=())
def sound_rows(embeddings: Tensor, keep: Tensor, ids: Tensor | None, below: int, what: str = "embeddings") -> Tensor:
    """Which of the rows to keep are finite, of unit length, and have an id in [0, below) (`below` 0: any id ≥ 0).

    On a CPU an unsound row raises, with `what` the rows are; elsewhere it is only marked, because reading a value would stall
    the device.
    """
    length = torch.linalg.vector_norm(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1)
    unit = (length - 1).abs() <= tolerance(embeddings.dtype)  # False for NaN too
    sound = unit & keep
    if ids is not None:
        sound &= (ids >= 0) & (ids < below) if below else ids >= 0
    if embeddings.device.type == "cpu" and not torch.equal(sound, keep):
        row = int((sound != keep).nonzero()[0])
        if not bool(embeddings[row].isfinite().all()):
            raise InputError(f"row {row} of the {what} contains NaN or infinity: look for a diverging model or a zero row")
        if not bool(unit[row]):
            given = float(length[row])
            raise InputError(
                f"row {row} of the {what} has length {given:.4g}, not 1: pass torch.nn.functional.normalize(embeddings)"
            )
        assert ids is not None
        limit = f"0 ≤ id < {below}, the memory's size" if below else "id ≥ 0"
        raise InputError(f"row {row} has the id {int(ids[row])}: instance ids must satisfy {limit}")
    return sound


@sound_rows.register_fake
def _(embeddings: Tensor, keep: Tensor, ids: Tensor | None, below: int, what: str = "embeddings") -> Tensor:
    return torch.empty_like(keep)


@torch.library.custom_op("xbm::same_rows", mutates_args=())
def same_rows(anchors: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, slots: Tensor, latest: Tensor) -> Tensor:
    """Which anchors are the rows enqueued last, in order: without ids, nothing else identifies an anchor's own copy."""
    inside = slots.clamp(min=0)
    same = (rows[inside] == anchors.to(rows.dtype)).all(1) & (row_labels[inside] == labels)
    same = (same | (slots < 0)) & (latest == len(labels)) | (latest == 0)  # any anchors may meet an empty memory
    if anchors.device.type == "cpu" and not bool(same.all()):
        raise InputError(
            "these anchors are not the rows enqueued last, in the same order: pass ids to enqueue and to the loss; if the "
            'memory holds the other side of pairs, pass exclude="none" or use TwoTowerLoss'
        )
    return same


@same_rows.register_fake
def _(anchors: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, slots: Tensor, latest: Tensor) -> Tensor:
    return torch.empty_like(labels, dtype=torch.bool)


@torch.library.custom_op("xbm::all_named", mutates_args=())
def all_named(row_ids: Tensor, stamps: Tensor, sound: Tensor) -> Tensor:
    """Raises if some rows were enqueued without ids: an anchor's own copy could be among them."""
    if bool(((row_ids < 0) & (stamps >= 0)).any()):
        raise InputError("the memory holds rows without ids: pass ids to every enqueue, or to none and not to the loss")
    return sound.clone()


@all_named.register_fake
def _(row_ids: Tensor, stamps: Tensor, sound: Tensor) -> Tensor:
    return torch.empty_like(sound)
