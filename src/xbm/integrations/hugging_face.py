"""The memory in the checkpoint folders of `transformers.Trainer`, and of trainers derived from it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from xbm.errors import InputError
from xbm.integrations import Stateful, States

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "xbm.integrations.hugging_face needs transformers: pip install transformers", name="transformers"
    ) from None

__all__ = ["FILE", "MemoryCallback"]

FILE = "xbm_memory.pt"  # in each checkpoint folder


class MemoryCallback(TrainerCallback):
    """Saves memories in every checkpoint folder, restores them when training resumes, and moves them to the device.

    It finds the folder that training resumes from as `checkpoint-STEP` in the output folder, or in
    `TrainingArguments.resume_from_checkpoint`. If you resume from another place, pass it here too.

    Args:
        checkpoint: the folder passed to `trainer.train(resume_from_checkpoint=...)`, if it is not in the output folder.
        objects: memories, and other objects with `state_dict` and `load_state_dict`, by the name to save them under.

    Raises:
        InputError: on resuming, if the folder holds no memory of that step, or one that does not fit.

    Example:
        >>> from xbm import CrossBatchMemory
        >>> memory = CrossBatchMemory(size=1000, dim=16)
        >>> callback = MemoryCallback(memory=memory)  # trainer = Trainer(..., callbacks=[callback])
    """

    def __init__(self, checkpoint: str | Path | None = None, **objects: Stateful) -> None:
        if checkpoint is not None and not isinstance(checkpoint, str | Path):
            raise InputError("pass a memory by name, such as MemoryCallback(memory=memory)")
        self.checkpoint, self.states = checkpoint, States(objects)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > 0 or self.checkpoint is not None:
            self.states.load_state_dict(self._read(args, state))
        self.states.to(args.device)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = {"step": state.global_step, "states": self.states.state_dict()}  # on every process: they may exchange rows
        if args.should_save:
            folder = next((folder for folder in _folders(args, state) if folder.is_dir()), None)
            if folder is None:
                raise InputError(
                    f"there is no folder checkpoint-{state.global_step} in {args.output_dir} to save the memory in"
                )
            _write(saved, folder / FILE)

    def _read(self, args: Any, state: Any) -> Any:
        given = [self.checkpoint] if self.checkpoint is not None else []
        named = [args.resume_from_checkpoint] if isinstance(args.resume_from_checkpoint, str | Path) else []
        folders = [Path(folder) for folder in (given or [*named, *_folders(args, state)])]
        for path in (folder / FILE for folder in folders):
            if path.is_file():
                saved = torch.load(path, map_location="cpu", weights_only=True)
                if saved["step"] == state.global_step:
                    return saved["states"]
        where = " and ".join(map(str, folders))
        raise InputError(
            f"training resumes at step {state.global_step}, but {where} holds no memory of that step: "
            f"pass MemoryCallback(checkpoint=...) the folder that has {FILE}, or resume from another checkpoint"
        )


def _folders(args: Any, state: Any) -> Iterator[Path]:
    """Where the checkpoint of the current step may be: in the output folder, or in that of a trial of a search."""
    output, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    if not state.is_hyper_param_search:
        yield output / name
    yield from sorted(output.glob(f"run-*/{name}"), key=lambda folder: -folder.stat().st_mtime)


def _write(state: Any, path: Path) -> None:
    """Replaces the file as a whole: a process that is killed leaves the old one, or none."""
    temporary = path.with_suffix(".part")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
