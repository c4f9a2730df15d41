"""Checks of what a caller hands in: shapes and types by raising at once, values without a host sync on a GPU."""

import torch
from torch import Tensor

from xbm.errors import InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_embeddings(embeddings: Tensor, what: str, dim: int | None = None) -> None:
    """A float matrix, with `dim` columns where the bank says so."""
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise InputError(f"{what} must be a matrix (rows, dim), not {shape}: pass one embedding a row")
    if not embeddings.is_floating_point():
        raise InputError(f"{what} are {embeddings.dtype}: pass float embeddings of unit length")
    if dim is not None and embeddings.shape[1] != dim:
        width = embeddings.shape[1]
        raise InputError(f"bank holds {dim}-d rows, {what} are {width}-d: build CrossBatchMemory(dim={width})")


def check_integers(values: Tensor, what: str, like: Tensor) -> Tensor:
    """One integer a row of `like`, on its device; returned as int64."""
    if not isinstance(values, Tensor) or values.dtype not in INTEGERS:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"{what} are {kind}: pass an integer tensor")
    if values.shape != (like.shape[0],):
        raise InputError(f"{like.shape[0]} embeddings but {what} of shape {tuple(values.shape)}: pass one a row")
    check_device(values, what, like, "the embeddings")
    return values.long()


def check_device(given: Tensor, what: str, other: Tensor, where: str) -> None:
    if given.device != other.device:
        raise InputError(f"{what} are on {given.device}, {where} on {other.device}: move them with .to({other.device})")


def tolerance(dtype: torch.dtype) -> float:
    """How far a row's length may be from 1 before it is more than rounding."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 1e-2


@torch.library.custom_op("xbm::sound_rows", mutates_args=())
def sound_rows(embeddings: Tensor, keep: Tensor, ids: Tensor | None, below: int) -> Tensor:
    """Which of the kept rows are finite, of unit length, and carry an id in [0, below) (`below` 0: any id ≥ 0).

    On the CPU an unsound row raises; elsewhere it is only marked, since looking would stop the device.
    """
    length = torch.linalg.vector_norm(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1)
    unit = (length - 1).abs() <= tolerance(embeddings.dtype)  # False for NaN too
    sound = unit & keep
    if ids is not None:
        sound &= (ids >= 0) & (ids < below) if below else ids >= 0
    if embeddings.device.type == "cpu" and not torch.equal(sound, keep):
        row = int((sound != keep).nonzero()[0])
        if not bool(embeddings[row].isfinite().all()):
            raise InputError(f"row {row} of the embeddings holds NaN or infinity: look for a diverging model or a zero row")
        if not bool(unit[row]):
            given = float(length[row])
            raise InputError(
                f"row {row} of the embeddings has length {given:.4g}, not 1: pass torch.nn.functional.normalize(embeddings)"
            )
        assert ids is not None
        limit = f"0 ≤ id < {below}, the memory's size" if below else "id ≥ 0"
        raise InputError(f"row {row} has the id {int(ids[row])}: instance ids must satisfy {limit}")
    return sound


@sound_rows.register_fake
def _(embeddings: Tensor, keep: Tensor, ids: Tensor | None, below: int) -> Tensor:
    return torch.empty_like(keep)
