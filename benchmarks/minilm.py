"""The MiniLM sentence encoder in plain torch, and one file with its weights and the tokens of a data set.

    python -m benchmarks.minilm clinc150.json clinc150-minilm.pt [--model NAME_OR_FOLDER]

A machine with torch alone can then run `python -m benchmarks.text`. The file contains only the words that occur in the data.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.text_memory import Encoder, read


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm_attention, self.norm_out = (nn.LayerNorm(width, epsilon) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout).transpose(1, 2).flatten(2)
        x = self.norm_attention(x + F.dropout(self.out(mixed), dropout))
        return self.norm_out(x + F.dropout(self.down(F.gelu(self.up(x))), dropout))


class MiniLM(nn.Module):
    """A BERT encoder, averaged over the tokens, on the unit sphere."""

    def __init__(
        self, words: int, width: int, layers: int, heads: int, inner: int, positions: int, dropout: float, epsilon: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.kind = nn.Parameter(torch.zeros(width))  # every token is of the first sentence
        self.norm = nn.LayerNorm(width, epsilon)
        self.layers = nn.ModuleList(Layer(width, heads, inner, dropout, epsilon) for _ in range(layers))

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        tokens, present = features["input_ids"], features["attention_mask"].bool()  # (n, L)
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.kind)
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, present[:, None, None, :])
        weights = present[:, :, None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1))


NAMES = {
    "attention.self.query": "query", "attention.self.key": "key", "attention.self.value": "value",
    "attention.output.dense": "out", "attention.output.LayerNorm": "norm_attention",
    "intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "norm_out",
}  # fmt: skip


def convert(bert: nn.Module, words: Tensor) -> tuple[dict[str, int | float], dict[str, Tensor]]:
    """Returns the arguments and the weights of a MiniLM that equals a `transformers.BertModel` for the given words."""
    config: Any = bert.config
    if config.hidden_act != "gelu" or config.hidden_dropout_prob != config.attention_probs_dropout_prob:
        sys.exit("only BERT encoders with GELU and one dropout rate can be converted")
    source = bert.state_dict()
    weights = {
        "words.weight": source["embeddings.word_embeddings.weight"][words],
        "positions.weight": source["embeddings.position_embeddings.weight"],
        "kind": source["embeddings.token_type_embeddings.weight"][0],
    }
    for name, value in source.items():
        stem, _, leaf = name.rpartition(".")
        if stem == "embeddings.LayerNorm":
            weights[f"norm.{leaf}"] = value
        elif stem.startswith("encoder.layer."):
            _, _, number, inner = stem.split(".", 3)
            weights[f"layers.{number}.{NAMES[inner]}.{leaf}"] = value
    arguments = {
        "words": len(words), "width": config.hidden_size, "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads, "inner": config.intermediate_size, "dropout": config.hidden_dropout_prob,
        "positions": config.max_position_embeddings, "epsilon": config.layer_norm_eps,
    }  # fmt: skip
    return arguments, weights


class Prepared:
    """What `main` wrote: the encoder and the tokens, on a device."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        file = torch.load(path, weights_only=True)
        self.labels, self.trained = file["labels"].long(), file["trained"]
        self.lengths = file["lengths"].long()  # on the CPU: a batch is cut to its longest utterance without a wait
        self.tokens = file["tokens"].to(device, torch.int64)
        self.mask = torch.arange(self.tokens.shape[1], device=device) < self.lengths.to(device)[:, None]
        self.encoder = MiniLM(**file["arguments"]).to(device)
        self.encoder.load_state_dict(file["weights"])

    def features(self, ids: Tensor) -> dict[str, Tensor]:
        rows, longest = ids.to(self.tokens.device), int(self.lengths[ids].max())
        return {"input_ids": self.tokens[rows, :longest], "attention_mask": self.mask[rows, :longest]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    options = parser.parse_args()
    data, encoder = read(options.data), Encoder(options.model, "cpu")
    features = encoder.features(data.texts)
    words, tokens = features["input_ids"].unique(return_inverse=True)
    arguments, weights = convert(encoder.model[0].model, words)
    file = {
        "tokens": tokens.short(), "lengths": features["attention_mask"].sum(1).short(),
        "labels": data.labels.short(), "trained": data.trained,
        "arguments": arguments, "weights": {name: value.half() for name, value in weights.items()},
    }  # fmt: skip
    torch.save(file, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB, {len(words):,} words, {len(tokens):,} utterances")


if __name__ == "__main__":
    main()
