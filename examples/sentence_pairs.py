"""Sentence pairs with a memory of past negatives, in sentence-transformers. Run: python examples/sentence_pairs.py

The memory is part of a loss, which SentenceTransformerTrainer calls like any other. Each pair is a class of two sentences,
given by the column `label`. An anchor's negatives come from many past batches, not only from its own. The model here averages
one vector per word; use any SentenceTransformer instead.
"""

import random
import tempfile
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn

from xbm import CrossBatchMemory, SupConLoss

WORDS, LENGTH = 200, 8


def pairs(count: int) -> Dataset:
    """Returns pairs of sentences that share most of their words."""
    draw, rows = random.Random(0), []
    for number in range(count):
        first = [f"word{draw.randrange(WORDS)}" for _ in range(LENGTH)]
        second = draw.sample(first, LENGTH - 2) + [f"word{draw.randrange(WORDS)}" for _ in range(2)]
        rows.append({"anchor": " ".join(first), "positive": " ".join(second), "label": number})
    return Dataset.from_list(rows)


class MemoryLoss(nn.Module):
    def __init__(self, model: SentenceTransformer, size: int) -> None:
        super().__init__()
        self.model, self.loss_fn = model, SupConLoss(temperature=0.1)
        self.memory = CrossBatchMemory(size, model.get_embedding_dimension())

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        v = F.normalize(torch.cat([self.model(features)["sentence_embedding"] for features in sentence_features]))
        ids = torch.cat([2 * labels, 2 * labels + 1])  # which sentence
        self.memory.enqueue(v.detach(), labels.repeat(2), ids)
        return self.loss_fn(v, labels.repeat(2), self.memory, ids=ids)


def tiny_model() -> SentenceTransformer:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{f"word{k}": k + 1 for k in range(WORDS)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = tiny_model()
    loss = MemoryLoss(model, size=500)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=100, per_device_train_batch_size=16, learning_rate=3e-2, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=25, disable_tqdm=True,
        )  # fmt: skip
        SentenceTransformerTrainer(model, arguments, train_dataset=pairs(300), loss=loss).train()
    assert len(loss.memory) == 500
