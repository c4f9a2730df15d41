"""Trains with transformers' Trainer: `whole`, or `first` the first half and in another process the `rest`."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from tests.xbm.integrations import small
from xbm.integrations.hugging_face import MemoryCallback


class MemoryTrainer(Trainer):
    bank: Any

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor], *_: object, **__: object) -> Tensor:
        return small.step(model, self.bank, **inputs)


def train(folder: Path, phase: str, callback: Any = None, resume: Any = True, output: str | None = None) -> None:
    """Of twelve steps, `first` makes six; a checkpoint is written after every third."""
    bank, (inputs, labels, ids) = small.memory(), small.data()
    items = [{"inputs": inputs[k], "labels": labels[k], "ids": ids[k]} for k in range(small.ITEMS)]
    arguments = TrainingArguments(
        str(folder / (output or ("whole" if phase == "whole" else "parts"))), max_steps=6 if phase == "first" else 12,
        per_device_train_batch_size=small.BATCH, learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        save_strategy="steps", save_steps=3, remove_unused_columns=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    model = small.net()
    callback = callback or (lambda bank: MemoryCallback(memory=bank))
    trainer = MemoryTrainer(
        model, arguments, train_dataset=items, callbacks=[callback(bank)],
        data_collator=lambda batch: {name: torch.stack([item[name] for item in batch]) for name in batch[0]},
    )  # fmt: skip
    trainer.bank = bank
    trainer.train(resume_from_checkpoint=resume if phase == "rest" else None)
    torch.save({"memory": bank.state_dict(), "model": model.state_dict()}, folder / f"{phase}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2])
