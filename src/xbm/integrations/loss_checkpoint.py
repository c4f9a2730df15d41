"""Keeps the state of a loss in the checkpoints of a Hugging Face Trainer, which saves the model's state only."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from xbm.errors import InputError


class LossCheckpoint(TrainerCallback):
    """Saves a loss, or any module, with each checkpoint of a Trainer, and restores it when training resumes.

    Args:
        loss: the module.
        file: name of the file in a checkpoint's folder; different for each loss of a trainer.

    The folder to resume from is `args.resume_from_checkpoint` if that is a path, else the checkpoint of the step in
    `args.output_dir`.

    Raises:
        InputError: on resuming, if the folder does not hold the file.
    """

    def __init__(self, loss: nn.Module, file: str = "loss.pt") -> None:
        self.loss, self.file = loss, file

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = _of_step(args, state)
        if not args.should_save or args.save_only_model or not folder.is_dir():
            return
        part = folder / f"{self.file}.part"
        torch.save(self.loss.state_dict(), part)
        os.replace(part, folder / self.file)  # a file under its own name is complete

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        named = args.resume_from_checkpoint
        path = (Path(named) if isinstance(named, str) and Path(named).is_dir() else _of_step(args, state)) / self.file
        if not path.exists():
            raise InputError(
                f"training resumes at step {state.global_step}, but there is no {path}: set resume_from_checkpoint in the "
                "training arguments to the checkpoint's folder, or leave out the callback to go on with an empty memory"
            )
        self.loss.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _of_step(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
