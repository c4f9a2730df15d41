"""Sentence pairs with a memory of past negatives, in Hugging Face's Trainer. Run: python examples/text_pairs.py

Each pair is a class of two sentences. An anchor's negatives come from many past batches, not only from its own.
The encoder is a tiny, randomly initialized BERT; use any other instead. For sentence-transformers see sentence_pairs.py.
"""

import random
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from xbm import CrossBatchMemory, SupConLoss

WORDS, LENGTH = 200, 8


def pairs(count: int) -> list[dict[str, list[list[int]] | int]]:
    """Returns pairs of sentences, as token ids, that share most of their words."""
    draw, rows = random.Random(0), []
    for number in range(count):
        first = [draw.randrange(WORDS) for _ in range(LENGTH)]
        second = draw.sample(first, LENGTH - 2) + [draw.randrange(WORDS) for _ in range(2)]
        rows.append({"sentences": [first, second], "pair": number})
    return rows


def collate(items: list[dict]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([sentence for item in items for sentence in item["sentences"]]),
        "labels": torch.tensor([item["pair"] for item in items]).repeat_interleave(2),
    }


class MemoryTrainer(Trainer):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.memory, self.loss_fn = CrossBatchMemory(size=600, dim=32), SupConLoss(temperature=0.1)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor], *_: object, **__: object) -> Tensor:
        labels = inputs["labels"]
        v = F.normalize(model(input_ids=inputs["input_ids"]).last_hidden_state.mean(1))
        ids = 2 * labels + torch.arange(len(labels), device=labels.device) % 2  # which sentence
        self.memory.enqueue(v.detach(), labels, ids)
        return self.loss_fn(v, labels, self.memory, ids=ids)


if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=16, learning_rate=3e-3, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=20, remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        MemoryTrainer(BertModel(config), arguments, train_dataset=pairs(300), data_collator=collate).train()
