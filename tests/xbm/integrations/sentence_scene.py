"""A tiny randomly initialized BERT, pairs of sentences, and a run of SentenceTransformerTrainer on them."""

import json
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import BertConfig, BertModel, BertTokenizerFast

from xbm.integrations import MemoryRankingLoss

try:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
except ImportError:  # before 6
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer

__all__ = ["MultipleNegativesRankingLoss"]
WORDS = [f"word{k}" for k in range(60)]


def write_bert(folder: Path, dropout: float = 0.1) -> Path:
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=65, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=24, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def new_model(bert: Path, **options) -> SentenceTransformer:
    transformer = Transformer(str(bert))
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu", **options)


def tokens(model: SentenceTransformer, rows: Dataset) -> list[dict]:
    """What a trainer passes to a loss."""
    tokenize = getattr(model, "preprocess", None) or model.tokenize
    return [tokenize(rows[name][:]) for name in rows.column_names]


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(count)]


def pairs(count: int = 60, columns: int = 2) -> Dataset:
    names = ["anchor", "positive", *(f"negative_{k}" for k in range(1, columns - 1))]
    return Dataset.from_dict({name: texts(count, seed) for seed, name in enumerate(names)})


def new_trainer(folder: Path, bert: Path, *, keep: bool = True, loss_options: dict | None = None, evaluated=None, **arguments):
    """A trainer of 8 steps that saves after 5; `keep`: whether its checkpoints contain the memory."""
    model = new_model(bert)
    loss = MemoryRankingLoss(model, **{"size": 43, "learn_temperature": True, "symmetric": True, **(loss_options or {})})
    settings = SentenceTransformerTrainingArguments(
        str(folder),
        **{
            "max_steps": 8, "save_steps": 5, "per_device_train_batch_size": 7, "learning_rate": 1e-2, "use_cpu": True,
            "report_to": [], "logging_steps": 1, "disable_tqdm": True, "seed": 3, **arguments,
        },
    )  # fmt: skip
    callbacks = [loss.callback] if keep else []
    return SentenceTransformerTrainer(model, settings, pairs(), evaluated, loss, callbacks=callbacks)


def outcome(trainer: SentenceTransformerTrainer) -> dict:
    """All that a run leaves behind."""
    weights = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"tensors": {**weights, **trainer.loss.state_dict()}, "losses": losses}


if __name__ == "__main__":  # resumes in a process of its own
    given = json.loads(sys.argv[1])
    trainer = new_trainer(Path(given["folder"]), Path(given["bert"]))
    trainer.train(resume_from_checkpoint=True)
    torch.save(outcome(trainer), given["result"])
