"""The memory in the checkpoints of `accelerate.Accelerator`.

With one process, `accelerator.register_for_checkpointing(memory)` is enough: a memory has the two methods that it needs. It
saves rank 0's object only, so with several processes every other memory would come back as a copy of rank 0's.
"""

from typing import Any

from xbm.integrations import Stateful, States

__all__ = ["register"]


def register(accelerator: Any, **objects: Stateful) -> None:
    """Moves memories to the accelerator's device and adds them to what it saves and loads, each process its own.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: memories, and other objects with `state_dict` and `load_state_dict`, by name.

    Example:
        >>> from accelerate import Accelerator
        >>> from xbm import CrossBatchMemory
        >>> memory = CrossBatchMemory(size=1000, dim=16)
        >>> register(Accelerator(cpu=True), memory=memory)  # before accelerator.save_state and load_state
    """
    states = States(objects)
    states.to(accelerator.device)
    accelerator.register_for_checkpointing(states)
