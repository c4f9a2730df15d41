"""The memory in the checkpoints of `lightning.Trainer`."""

from collections.abc import Mapping
from typing import Any

from xbm.errors import InputError
from xbm.integrations import Stateful, States

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as missing:
    if missing.name not in ("lightning", "lightning.pytorch"):
        raise
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]  # the same under its older name
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "xbm.integrations.lightning needs lightning: pip install lightning", name="lightning"
        ) from None

__all__ = ["MemoryCallback"]


class MemoryCallback(Callback):
    """Saves memories in every checkpoint, restores them in `trainer.fit(..., ckpt_path=...)`, and moves them to the device.

    A memory that is a submodule of the LightningModule needs none of this: Lightning moves and saves its buffers. Use the
    callback for a memory outside the module, and with several processes, where a submodule's buffers would be broadcast from
    rank 0: there each process gets its own memory back, or its part of a `ReplicatedMemory` or `ShardedMemory`.

    Args:
        attributes: names of attributes of the LightningModule, looked up when they are needed. For memories that are created
            in its `setup`, and kept out of its submodules with `self.__dict__["memory"] = memory`.
        objects: other memories, and other objects with `state_dict` and `load_state_dict`, by the name to save them under.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from xbm import CrossBatchMemory
        >>> memory = CrossBatchMemory(size=1000, dim=16)
        >>> trainer = Trainer(callbacks=[MemoryCallback(memory=memory)], logger=False, accelerator="cpu")
    """

    def __init__(self, *attributes: str, **objects: Stateful) -> None:
        super().__init__()
        if not all(isinstance(name, str) for name in attributes):
            raise InputError("pass a memory by name, such as MemoryCallback(memory=memory)")
        self.attributes, self.objects = attributes, objects
        self._module: Any = None
        if objects or not attributes:
            States(objects)  # refuses what cannot be saved now, not at the first checkpoint

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._module = pl_module

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._states().to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        return self._states().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._states().load_state_dict(state_dict)

    def _states(self) -> States:
        found: dict[str, Any] = {}
        for name in self.attributes:
            found[name] = getattr(self._module, name, None)
            if found[name] is None:
                raise InputError(f"{type(self._module).__name__} has no attribute {name!r}: create it in __init__ or setup")
        return States({**found, **self.objects})
