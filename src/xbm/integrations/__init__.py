"""Cross-batch memory in the trainers of other libraries.

Names are loaded on first use: each needs the library that it is for, and no other. Here is what the integrations share: the
state of memories, and of other objects that train, as one entry of a checkpoint.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from xbm.distributed import Ranks, ReplicatedMemory, ShardedMemory
from xbm.errors import InputError

if TYPE_CHECKING:
    from xbm.integrations.sentence_transformers_loss import MemoryRankingLoss as MemoryRankingLoss

_HOME = {
    "MemoryRankingLoss": "xbm.integrations.sentence_transformers_loss",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'xbm.integrations' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class Stateful(Protocol):
    """What a checkpoint can hold: a memory, a loss with parameters, or any other object with these two methods."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class States:
    """Objects under names, saved and loaded together.

    With several processes, a `ReplicatedMemory` or `ShardedMemory` has one state, which any number of processes can load. Any
    other object is a different one on each process: the state of each is saved, and each gets its own back.

    Args:
        objects: by name.

    Example:
        >>> from xbm import CrossBatchMemory
        >>> one, other = CrossBatchMemory(size=3, dim=2), CrossBatchMemory(size=3, dim=2)
        >>> one.enqueue(torch.eye(2), torch.tensor([7, 8]))
        >>> States({"memory": other}).load_state_dict(States({"memory": one}).state_dict())
        >>> other.labels.tolist()
        [7, 8]
    """

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        if not objects:
            raise InputError("nothing to save: pass a memory, such as memory=memory")
        for name, each in objects.items():
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise InputError(f"{name} must have state_dict() and load_state_dict(), got {type(each).__name__}")
        self.objects = dict(objects)

    def to(self, device: torch.device | str) -> None:
        """Moves the objects that can be moved."""
        for each in self.objects.values():
            if isinstance(each, torch.nn.Module):
                each.to(device)

    def state_dict(self) -> dict[str, list[Any]]:
        """The states on rank 0, with all tensors on the CPU, and {} elsewhere. All processes must call it."""
        ranks = Ranks()
        states = {}
        for name, each in self.objects.items():
            state = _on_cpu(each.state_dict())
            everyone = [state]
            if ranks.world > 1 and not isinstance(each, ReplicatedMemory | ShardedMemory):
                parts: list[Any] | None = [None] * ranks.world if ranks.first else None
                dist.gather_object(state, parts)
                everyone = parts or []
            states[name] = everyone
        return states if ranks.first else {}

    def load_state_dict(self, state_dict: Mapping[str, list[Any]]) -> None:
        """Loads what `state_dict` returned on rank 0; all processes pass the same.

        Raises:
            InputError: if a state is missing, is that of another number of processes, or does not fit its object.
        """
        ranks = Ranks()
        for name, each in self.objects.items():
            if name not in state_dict:
                raise InputError(f"the checkpoint holds no state of {name!r}: resume without it, or from another checkpoint")
            states, shared = state_dict[name], isinstance(each, ReplicatedMemory | ShardedMemory)
            if (saved := len(states)) != (1 if shared else ranks.world):
                raise InputError(
                    f"the checkpoint holds the state of {name} on {saved} processes, and this run has {ranks.world}: resume "
                    f"with {saved}, or use ReplicatedMemory or ShardedMemory, which any number of processes can load"
                )
            load_state(each, states[0 if shared else ranks.rank], name)


def load_state(target: Stateful, state: Any, name: str) -> None:
    """Loads what a checkpoint holds, or raises InputError if it does not fit."""
    try:
        target.load_state_dict(state)
    except (InputError, RuntimeError, KeyError) as error:  # the latter two for missing or unknown names
        why = f" ({error})" if isinstance(error, InputError) else ""
        raise InputError(
            f"the state of {name} in the checkpoint does not fit it{why}: build it as it was when the checkpoint was saved"
        ) from error


def _on_cpu(state: Any) -> Any:
    """The same nested state with its tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {name: _on_cpu(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_on_cpu(value) for value in state]
    return state
