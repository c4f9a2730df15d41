"""Sentence pairs with a memory of past negatives, in sentence-transformers. Run: python examples/sentence_pairs.py

MemoryRankingLoss takes the place of MultipleNegativesRankingLoss. An anchor's negatives come from many past batches, not only
from its own; its callback keeps the memory in the trainer's checkpoints. The model here averages one vector per word; use any
SentenceTransformer instead.
"""

import random
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from xbm.integrations import MemoryRankingLoss

WORDS, LENGTH = 200, 8


def pairs(count: int) -> Dataset:
    """Returns pairs of sentences that share most of their words."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        first = [f"word{draw.randrange(WORDS)}" for _ in range(LENGTH)]
        second = draw.sample(first, LENGTH - 2) + [f"word{draw.randrange(WORDS)}" for _ in range(2)]
        rows.append({"anchor": " ".join(first), "positive": " ".join(second)})
    return Dataset.from_list(rows)


def tiny_model() -> SentenceTransformer:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{f"word{k}": k + 1 for k in range(WORDS)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = tiny_model()
    loss = MemoryRankingLoss(model, size=200)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=100, per_device_train_batch_size=16, learning_rate=3e-2, use_cpu=True, report_to=[],
            save_steps=50, logging_steps=25, disable_tqdm=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(model, arguments, pairs(300), loss=loss, callbacks=[loss.callback])
        trainer.train()
    assert len(loss.documents) == 200
