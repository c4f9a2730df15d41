"""Finds a function's source code by its docstring, and the docstring by the code. Run: python examples/two_towers.py

Two towers, one for docstrings and one for code, are trained from scratch, without and with a memory of past pairs, and scored
on functions that they were not trained on. The functions are those of the standard library and of torch, so there is nothing
to download. docs/pairs.md has results over seeds, and says how the settings were chosen.
"""

import argparse
import ast
import copy
import math
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm import SupConLoss, TwoTowerLoss
from xbm.retrieval import evaluate

FOLDERS = (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent)
LEFT_OUT = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages", "_vendor"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of prose, of snake_case, of CamelCase
BUCKETS, DIM = 2**14, 128
KS = (1, 5, 10)


# ------------------------------------------------------------------ the pairs


def read_functions(folder: Path) -> Iterator[tuple[str, str]]:
    """The first paragraph of the docstring, and the source without the docstring, of every function that has both."""
    for path in sorted(folder.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(folder).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # a file that is meant to be broken, or for another version
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) == 1:
                continue
            if docstring := ast.get_docstring(node):
                first = node.body[0]
                code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
                yield docstring.split("\n\n")[0], "\n".join(code)


def words(text: str) -> tuple[int, ...]:
    """The different words of a text, each as the hash of its first five letters."""
    return tuple(sorted({zlib.crc32(w.lower()[:5].encode()) % BUCKETS for w in WORD.findall(text) if len(w) > 1}))


@dataclass(frozen=True)
class Pairs:
    texts: list[tuple[tuple[int, ...], tuple[int, ...]]]  # the words of docstring and code
    labels: Tensor  # (N,): pairs with the same docstring or the same code, directly or through others, share one
    quarter: Tensor  # (N,), 0 to 3, by label: what is tested does not occur in training

    def bags(self, ids: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """What a tower takes: the words of all texts in a row, and where each text starts."""
        bags = [torch.tensor(self.texts[k][side]) for k in ids.tolist()]
        return torch.cat(bags), torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)


def read_pairs(folders: Sequence[Path] = FOLDERS) -> Pairs:
    functions = [function for folder in folders for function in read_functions(folder)]
    texts = [(words(docstring), words(code)) for docstring, code in functions]
    texts = [(docstring, code) for docstring, code in texts if len(docstring) >= 3 and len(code) >= 8]
    same_as, first = list(range(len(texts))), dict[tuple, int]()

    def label(k: int) -> int:
        return k if same_as[k] == k else label(same_as[k])

    for k, pair in enumerate(texts):
        for side in range(2):
            other = first.setdefault((side, pair[side]), k)
            same_as[label(k)] = label(other)
    labels = [label(k) for k in range(len(texts))]
    return Pairs(texts, torch.tensor(labels), torch.tensor([zlib.crc32(str(y).encode()) % 4 for y in labels]))


# ------------------------------------------------------------------ the towers


class Tower(nn.Module):
    """A weighted sum of word vectors and a small network on top. In training three words of ten are left out."""

    def __init__(self, importance: Tensor) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, DIM, mode="sum")
        with torch.no_grad():
            self.words.weight *= importance[:, None]
        self.norm = nn.LayerNorm(DIM)
        self.network = nn.Sequential(nn.Dropout(0.1), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, words: Tensor, starts: Tensor) -> Tensor:
        kept = (torch.rand(len(words)) > 0.3).float() + 1e-3 if self.training else torch.ones(len(words))
        x = DIM**0.5 * F.normalize(self.words(words, starts, per_sample_weights=kept))
        return F.normalize(x + self.network(self.norm(x)))


def new_towers(pairs: Pairs, ids: Tensor) -> tuple[Tower, Tower]:
    """Two equal towers, so that a docstring is near code with the same rare words before any training."""
    contain = torch.zeros(BUCKETS)
    for k in ids.tolist():
        contain[list({*pairs.texts[k][0], *pairs.texts[k][1]})] += 1
    queries = Tower(torch.log(len(ids) / (1 + contain)).clamp(min=0))
    return queries, copy.deepcopy(queries)


@torch.no_grad()
def score(towers: tuple[Tower, Tower], pairs: Pairs, ids: Tensor) -> dict[str, float]:
    """Recall@K of code by docstring (`code@K`) and of docstrings by code (`docstring@K`); a duplicate counts as a hit."""
    labels, v = pairs.labels[ids], []
    for side, tower in enumerate(towers):
        tower.eval()
        v.append(torch.cat([tower(*pairs.bags(part, side)) for part in ids.split(512)]))
    ways = {"code": evaluate(v[0], labels, v[1], labels, ks=KS), "docstring": evaluate(v[1], labels, v[0], labels, ks=KS)}
    return {f"{name}@{k}": scores[f"recall@{k}"] for name, scores in ways.items() for k in KS}


# ------------------------------------------------------------------ training


def train(
    towers: tuple[Tower, Tower], pairs: Pairs, ids: Tensor, *, size: int, rate: float, batch: int = 32, seed: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Trains the towers as long as the caller iterates, and yields the number of the step and its loss.

    Args:
        ids: (n,), the pairs to train on.
        size: pairs in memory; 0: no memory.
        rate: learning rate.
    """
    torch.manual_seed(seed)
    criterion = TwoTowerLoss(SupConLoss(temperature=0.07, learn_temperature=True), size=size, dim=DIM)
    groups = [
        {"params": [p for tower in towers for p in tower.parameters()], "weight_decay": 0.01},
        {"params": criterion.parameters(), "weight_decay": 0.0},  # the temperature
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
    order, step = torch.Generator().manual_seed(seed), 0  # batches of their own, which do not depend on the memory
    while True:
        for part in ids[torch.randperm(len(ids), generator=order)].split(batch)[: len(ids) // batch]:
            queries, documents = (tower.train()(*pairs.bags(part, side)) for side, tower in enumerate(towers))
            loss = criterion(queries, documents, labels=pairs.labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            yield step, loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS, help="of Python files (default: stdlib and torch)")
    parser.add_argument("--size", type=int, default=1024, help="pairs in memory")
    parser.add_argument("--iterations", type=int, default=800)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args()

    pairs = read_pairs(options.folders)
    ids, test = (pairs.quarter != 1).nonzero()[:, 0], (pairs.quarter == 1).nonzero()[:, 0]
    print(f"{len(ids):,} functions to train on, {len(test):,} to test on")
    rows = {}
    for name, size in (("without memory", 0), ("with memory", options.size)):
        torch.manual_seed(0)
        towers = new_towers(pairs, ids)
        rows.setdefault("untrained", score(towers, pairs, test))
        for step, loss in train(towers, pairs, ids, size=size, rate=options.rate):
            if step % math.ceil(options.iterations / 5) == 0:
                print(f"{name}, step {step}: loss {loss:.3f}", flush=True)
            if step == options.iterations:
                break
        rows[name] = score(towers, pairs, test)
    print(f"{'recall@K, %':>16}", *(f"{metric:>13}" for metric in rows["untrained"]))
    for name, scores in rows.items():
        print(f"{name:>16}", *(f"{100 * value:13.1f}" for value in scores.values()))


if __name__ == "__main__":
    main()
