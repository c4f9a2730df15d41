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


class SavedBeside(TrainerCallback):
    """What is saved in a file of its own in every checkpoint folder, with the step that it belongs to."""

    file: str

    def claim(self, state: Any, owner: object, advice: str) -> None:
        """Raises if something else is saved in the same file in this training."""
        owners = vars(state).setdefault("_xbm_files", {})  # a state belongs to one training, and only its fields are saved
        if owners.setdefault(self.file, owner) is not owner:
            raise InputError(f"two callbacks of this trainer would write the same {self.file} in each checkpoint: {advice}")

    def read(self, args: Any, state: Any, advice: str, folder: str | Path | None = None) -> Any:
        """What `write` wrote at the step at which training resumes: in the folder, or where the trainer has its checkpoints."""
        named = [args.resume_from_checkpoint] if isinstance(args.resume_from_checkpoint, str | Path) else []
        folders = [Path(each) for each in ([*named, *_folders(args, state)] if folder is None else [folder])]
        for path in (each / self.file for each in folders):
            if path.is_file():
                saved = torch.load(path, map_location="cpu", weights_only=True)
                if saved.get("step") == state.global_step:
                    return saved
        where = " and ".join(map(str, folders))
        raise InputError(
            f"training resumes at step {state.global_step}, but {where} holds no {self.file} of that step: {advice}"
        )

    def write(self, args: Any, state: Any, content: dict[str, Any]) -> None:
        folder = next((folder for folder in _folders(args, state) if folder.is_dir()), None)
        if folder is None:
            raise InputError(f"there is no folder checkpoint-{state.global_step} in {args.output_dir} to save {self.file} in")
        _write({"step": state.global_step, **content}, folder / self.file)


class MemoryCallback(SavedBeside):
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

    file = FILE

    def __init__(self, checkpoint: str | Path | None = None, **objects: Stateful) -> None:
        if checkpoint is not None and not isinstance(checkpoint, str | Path):
            raise InputError("pass a memory by name, such as MemoryCallback(memory=memory)")
        self.checkpoint, self.states = checkpoint, States(objects)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.claim(state, self, "pass all memories to one MemoryCallback, by different names")
        if state.global_step > 0 or self.checkpoint is not None:
            advice = f"pass MemoryCallback(checkpoint=...) the folder that has {FILE}, or resume from another checkpoint"
            self.states.load_state_dict(self.read(args, state, advice, self.checkpoint)["states"])
        self.states.to(args.device)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        states = self.states.state_dict()  # on every process: they may exchange rows
        if args.should_save:
            self.write(args, state, {"states": states})


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
