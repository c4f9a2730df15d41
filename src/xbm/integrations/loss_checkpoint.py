"""Keeps the state of a loss in the checkpoints of a Hugging Face Trainer, which saves the model's state only."""

from pathlib import Path
from typing import Any

from torch import nn

from xbm.errors import InputError
from xbm.integrations import load_state
from xbm.integrations.hugging_face import SavedBeside


class LossCheckpoint(SavedBeside):
    """Saves a loss, or any module, with each checkpoint of a Trainer, and restores it when training resumes.

    Args:
        loss: the module.
        file: name of the file in a checkpoint's folder; different for each loss of a trainer.

    It finds the folder to resume from as `args.resume_from_checkpoint` if that is a path, or else as the checkpoint of the step
    in `args.output_dir`. Checkpoints of the model alone (`save_only_model`) do not contain the loss.

    Raises:
        InputError: when training begins, if another loss of the trainer has the same file; on resuming, if the folder does not
            hold the file of that step, or one that does not fit; on saving, if there is no folder.

    Example:
        >>> from xbm import SupConLoss
        >>> first, second = (SupConLoss(0.07, learn_temperature=True) for _ in range(2))
        >>> callbacks = [LossCheckpoint(first, "first.pt"), LossCheckpoint(second, "second.pt")]  # of a Trainer
    """

    def __init__(self, loss: nn.Module, file: str = "loss.pt") -> None:
        if not isinstance(file, str) or not file or Path(file).name != file or file == "..":
            raise InputError(f'file must be the name of a file in the folder of a checkpoint, such as "a.pt", got {file!r}')
        self.loss, self.file = loss, file

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.claim(state, self.loss, f'pass LossCheckpoint(loss, "a.pt") of {__name__} for each, with different names')
        if state.global_step > 0:
            advice = (
                "set resume_from_checkpoint in the training arguments to the checkpoint's folder, or leave out the callback to "
                "go on with an empty memory"
            )
            load_state(self.loss, self.read(args, state, advice)["loss"], "the loss")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save and not args.save_only_model:
            self.write(args, state, {"loss": self.loss.state_dict()})
