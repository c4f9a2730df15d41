"""The comparison with other packages: every cell has a file and what is searched for in it.

    python docs/site/comparison.py                 writes docs/comparison.md
    python docs/site/comparison.py SITE_PACKAGES   checks every cell against the packages installed there

To install them without their dependencies: pip install --no-deps --target DIR NAME==VERSION ... with `VERSIONS` below.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "comparison.md"
VERSIONS = {
    "pytorch-metric-learning": "2.9.0",
    "open-metric-learning": "4.0.0",
    "sentence-transformers": "6.2.0",
    "lightly": "1.6.0",
}
MODULES = {
    "xbm": "xbm",
    "pytorch-metric-learning": "pytorch_metric_learning",
    "open-metric-learning": "oml",
    "sentence-transformers": "sentence_transformers",
    "lightly": "lightly",
}
SHORT = {"open-metric-learning": "OML"}
INTRODUCTION = Path(__file__).with_suffix(".txt")


class Cell(NamedTuple):
    """What a package does, and where that can be seen.

    `pattern` is searched in the files that `where` names, relative to the package; a pattern that starts with "no " must
    not be found in any of them.
    """

    text: str
    where: str
    pattern: str


class Row(NamedTuple):
    question: str
    cells: tuple[Cell, Cell, Cell, Cell, Cell]  # in the order of MODULES
    in_readme: bool = False


def no(where: str, pattern: str, text: str = "no") -> Cell:
    return Cell(text, where, f"no {pattern}")


MINER = "miners/inbatch_nhard_tri.py"
CBM, BANK, QUEUE = "losses/cross_batch_memory.py", "miners/miner_with_bank.py", "models/modules/memory_bank.py"
NOTHING = r"(?i)memory.?bank|momentum_encoder|embedding_memory|cross.?batch.?memory"
NO_MEMORY = no("**/*.py", NOTHING, "–")
ROWS = [
    Row(
        "memory of past batches",
        (
            Cell("`CrossBatchMemory`", "memory.py", r"class CrossBatchMemory"),
            Cell("`CrossBatchMemory`", CBM, r"class CrossBatchMemory"),
            Cell("`MinerWithBank`", BANK, r"class MinerWithBank"),
            no("**/*.py", NOTHING, "none"),
            Cell("`MemoryBankModule`", QUEUE, r"class MemoryBankModule"),
        ),
        True,
    ),
    Row(
        "losses that take it",
        (
            Cell("8, and `MetricLearningLoss`", "losses/__init__.py", r"LOSSES: dict"),
            Cell("14", CBM, r'(?s)supported_losses.*?return \[(\s+"\w+",){14}\s+\]'),
            Cell("triplet", BANK, r"assert isinstance\(miner, NHardTripletsMiner\)"),
            NO_MEMORY,
            Cell("NT-Xent, CO2, NNCLR's", "loss/regularizer/co2.py", r"self.memory_bank = MemoryBankModule"),
        ),
        True,
    ),
    Row(
        "positives from the memory (labels)",
        (
            Cell("yes", "memory.py", r"def enqueue\(self, embeddings: Tensor, labels: Tensor"),
            Cell("yes", CBM, r"self.label_memory\["),
            Cell("yes", BANK, r"self.bank_labels\["),
            NO_MEMORY,
            Cell("no labels", QUEUE, r"Should always be None, will be ignored"),
        ),
        True,
    ),
    Row(
        "one slot per image, averaged",
        (
            Cell("yes", "memory.py", r'UPDATES = \("queue", "moving_average", "backprop"\)'),
            no(CBM, r"momentum|average|\bids\b"),
            no(BANK, r"momentum|average_|\bimage_ids\b"),
            NO_MEMORY,
            no(QUEUE, r"momentum|average"),
        ),
        True,
    ),
    Row(
        "leaves out old rows of the anchor's own image",
        (
            Cell("yes, by id", "engine/pairing.py", r'exclude == "instance"'),
            Cell("rows of this batch only", CBM, r"remove_self_comparisons\(\s*indices_tuple, self.curr_batch_idx"),
            no(BANK, r"\b(image|instance|sample)_ids\b"),
            NO_MEMORY,
            no(QUEUE, r"\bids\b"),
        ),
    ),
    Row(
        "memory in the checkpoint",
        (
            Cell("all of it", "memory.py", r"register_buffer\(name, torch.zeros\(\(\), dtype=torch.int64"),
            Cell("rows and labels, not the position", CBM, r"self.has_been_filled = False\s+self.queue_idx = 0"),
            Cell("no: plain attributes", BANK, r"self.bank_features: Optional\[Tensor\] = None"),
            NO_MEMORY,
            Cell("no: `persistent=False`", QUEUE, r"persistent=False"),
        ),
        True,
    ),
    Row(
        "memory on several processes",
        (
            Cell("a copy or a shard on each", "distributed/distributed_memory.py", r"class ShardedMemory"),
            Cell("a copy", "utils/distributed.py", r"forward_cross_batch"),
            no(BANK, r"gather", "each its own"),
            NO_MEMORY,
            Cell("a copy", QUEUE, r"gather_distributed"),
        ),
        True,
    ),
    Row(
        "how a loss sees the rows",
        (
            Cell("one pass, no m × M matrix", "engine/streaming.py", r"one pass"),
            Cell("index lists of all pairs", CBM, r"get_all_pairs_indices"),
            Cell("all distances within batch and bank", MINER, r"pairwise_dist\(x1=features, x2=features"),
            NO_MEMORY,
            Cell("m × M similarities", "loss/ntx_ent_loss.py", r'"nc,ck->nk"'),
        ),
    ),
    Row(
        "GPU kernels of its own",
        (
            Cell("Triton, for eight losses; `auto` uses three", "engine/triton/__init__.py", r"CHECKED_ON_GPU"),
            no("**/*.py", r"import triton"),
            no("**/*.py", r"import triton"),
            no("**/*.py", r"import triton"),
            no("**/*.py", r"import triton"),
        ),
    ),
    Row(
        "slow copy of the model (MoCo)",
        (
            Cell("`MomentumEncoder`", "momentum_encoder.py", r"class MomentumEncoder"),
            no("**/*.py", r"(?i)momentum_encoder|update_momentum"),
            no("**/*.py", r"(?i)momentum_encoder|update_momentum"),
            no("**/*.py", r"(?i)momentum_encoder|update_momentum"),
            Cell("`update_momentum`", "models/utils.py", r"def update_momentum"),
        ),
    ),
    Row(
        "large batches in chunks",
        (
            Cell("`cached_backward`, any loss", "gradient_cache.py", r"def cached_backward"),
            no("**/*.py", r"(?i)grad_?cache|cached_backward"),
            no("**/*.py", r"(?i)grad_?cache|cached_backward"),
            Cell("`Cached…Loss`", "base/losses/gradcache.py", r"(?i)gradcache"),
            no("**/*.py", r"(?i)grad_?cache|cached_backward"),
        ),
        True,
    ),
    Row(
        "finds likely label errors",
        (
            Cell("yes, with one slot per image", "../xbm_app/train/label_errors.py", r"def ignore_label_errors"),
            no("**/*.py", r"(?i)mislabel|label.?error|noisy.label|wrong.label"),
            no("**/*.py", r"(?i)mislabel|label.?error|noisy.label|wrong.label"),
            no("**/*.py", r"(?i)mislabel|label.?error|noisy.label|wrong.label"),
            no("**/*.py", r"(?i)mislabel|label.?error|noisy.label|wrong.label"),
        ),
    ),
    Row(
        "trains from the command line",
        (
            Cell("`xbm train`", "../xbm_app/cli/train.py", r"def train"),
            no("../{dist}/entry_points.txt", r"console_scripts"),
            Cell("no; pipelines from Hydra configs", "lightning/pipelines/train.py", r"def extractor_training_pipeline"),
            no("../{dist}/entry_points.txt", r"console_scripts"),
            Cell("`lightly-ssl-train`", "../{dist}/entry_points.txt", r"lightly-ssl-train"),
        ),
    ),
    Row(
        "search page and API",
        (
            Cell("`xbm serve`", "../xbm_app/serve/server.py", r"FastAPI"),
            no("**/*.py", r"import (fastapi|flask|uvicorn)|from (fastapi|flask) import"),
            no("**/*.py", r"import (fastapi|flask|uvicorn)|from (fastapi|flask) import"),
            no("**/*.py", r"import (fastapi|flask|uvicorn)|from (fastapi|flask) import"),
            no("**/*.py", r"import (fastapi|flask|uvicorn)|from (fastapi|flask) import"),
        ),
    ),
    Row(
        "miners that combine with any loss",
        (
            no("**/*.py", r"class \w+Miner\b"),
            Cell("yes", "miners/base_miner.py", r"class BaseMiner"),
            Cell("for triplets", "interfaces/miners.py", r"class ITripletsMiner"),
            Cell("offline, `mine_hard_negatives`", "util/hard_negatives.py", r"def mine_hard_negatives"),
            no("**/*.py", r"class \w+Miner\b"),
        ),
    ),
    Row(
        "re-ranking",
        (
            no("**/*.py", r"(?i)rerank|re-rank"),
            no("**/*.py", r"(?i)rerank|re-rank"),
            Cell("pairwise models", "retrieval/postprocessors/pairwise.py", r"class PairwiseReranker"),
            Cell("cross-encoders", "cross_encoder/model.py", r"class CrossEncoder"),
            no("**/*.py", r"(?i)rerank|re-rank"),
        ),
    ),
    Row(
        "license",
        (
            Cell("MIT", "../../LICENSE", r"MIT License"),
            Cell("MIT", "../{dist}/METADATA", r"License :: OSI Approved :: MIT"),
            Cell("Apache 2.0", "../{dist}/METADATA", r"License: Apache License 2.0"),
            Cell("Apache 2.0", "../{dist}/METADATA", r"License-Expression: Apache-2.0"),
            Cell("MIT", "../{dist}/METADATA", r"License :: OSI Approved :: MIT"),
        ),
        True,
    ),
]


def dist_of(package: str) -> str:
    return f"{package.replace('-', '_')}-{VERSIONS[package]}.dist-info" if package in VERSIONS else ""


def folder_of(package: str, installed: Path | None) -> Path:
    return ROOT / "src" / "xbm" if package == "xbm" or installed is None else installed / MODULES[package]


def wrong(package: str, cell: Cell, installed: Path | None) -> str | None:
    """What contradicts a cell; None if nothing does."""
    where = cell.where.format(dist=dist_of(package))
    folder = folder_of(package, installed)
    files = sorted(folder.glob(where)) if "*" in where else [folder / where]
    files = [file for file in files if file.exists()]
    if not files and not where.endswith("entry_points.txt"):  # a package without commands has no such file
        return f"there is no {where}"
    absent = cell.pattern.startswith("no ")
    pattern = re.compile(cell.pattern.removeprefix("no "), re.MULTILINE)
    hits = [file for file in files if pattern.search(file.read_text(encoding="utf-8", errors="replace"))]
    if absent:
        return f"{pattern.pattern!r} is in {hits[0]}" if hits else None
    return None if hits else f"{pattern.pattern!r} is not in {where}"


def check(installed: Path, packages: list[str]) -> Iterator[str]:
    """What contradicts the table, in the packages that are installed in a folder."""
    for package in packages:
        if package != "xbm" and not (installed / dist_of(package)).is_dir():
            yield f"{package} {VERSIONS[package]} is not in {installed}"
            continue
        for row in ROWS:
            found = wrong(package, row.cells[list(MODULES).index(package)], installed)
            if found:
                yield f"{package}, {row.question}: {found}"


def names() -> list[str]:
    return [SHORT.get(package, package) for package in MODULES]


def table(rows: list[Row]) -> str:
    lines = ["| | " + " | ".join(names()) + " |", "| --- " * (len(MODULES) + 1) + "|"]
    lines += [f"| {row.question} | " + " | ".join(cell.text for cell in row.cells) + " |" for row in rows]
    return "\n".join(lines)


def source(package: str, cell: Cell) -> str:
    where = cell.where.format(dist=dist_of(package)).replace("**/*.py", "no file")
    verb = "" if not cell.pattern.startswith("no ") or where == "no file" else "without "
    pattern = cell.pattern.removeprefix("no ").replace("|", "\\|")
    return f"`{where}`: {verb}`{pattern}`" if where != "no file" else f"no `.py` file has `{pattern}`"


def page() -> str:
    parts = [INTRODUCTION.read_text(encoding="utf-8").format(**VERSIONS), "## What does each contain?\n", table(ROWS) + "\n"]
    parts += [
        "## In short\n\nThe rows that the README shows.\n",
        "<!-- short comparison -->",
        short(),
        "<!-- end of short comparison -->\n",
        "## Where does each cell come from?\n",
        "Paths are relative to the package; patterns are regular expressions.\n",
        "| | package | source |\n| --- | --- | --- |",
    ]
    for row in ROWS:
        for package, cell in zip(MODULES, row.cells):
            parts.append(f"| {row.question} | {SHORT.get(package, package)} | {source(package, cell)} |")
    return "\n".join(parts) + "\n"


def short() -> str:
    return table([row for row in ROWS if row.in_readme])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        contradictions = list(check(Path(sys.argv[1]), list(MODULES)))
        print("\n".join(contradictions) or f"all {len(ROWS) * len(MODULES)} cells agree with the sources")
        sys.exit(bool(contradictions))
    PAGE.write_text(page(), encoding="utf-8")
