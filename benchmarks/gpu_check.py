"""Compares every kernel on the GPU with float64 on random odd shapes; inputs are at least 1e-4 from every threshold.

    python -m benchmarks.gpu_check --part 0 --of 12 --out FILE

gpu_losses.py starts all parts at once, since most of the time is spent compiling.
"""

import argparse
import importlib
import itertools
import json
import random
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm import ContrastiveLoss, CrossBatchMemory, MultiSimilarityLoss, TripletLoss
from xbm.checks import tolerance
from xbm.engine.pairing import pair
from xbm.losses import PairLoss

WIDTHS = (16, 64, 100, 128, 129, 256, 512, 768, 2048)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCTIONS = {"contrastive": "sum", "averaged": "mean", "balanced": "balanced"}  # of the contrastive loss
KINDS = (*REDUCTIONS, "multi_similarity", "triplet")
WAYS = ("instance", "copy", "newest", "batch", "rows")
steps = importlib.import_module("xbm.engine.triton.plan")
ROWS_OF_A_SMALL_BANK = steps.SMALL  # every other case takes the path of large memories
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
CLEAR = 1e-4


def loss_of(kind: str, engine: str) -> PairLoss:
    if kind in REDUCTIONS:
        return ContrastiveLoss(margin=0.3, reduction=REDUCTIONS[kind], engine=engine)
    return MultiSimilarityLoss(engine=engine) if kind == "multi_similarity" else TripletLoss(margin=0.1, engine=engine)


def far_from_unit_length(anchors: Tensor) -> Tensor:
    """Marks anchors that rounding to a half type has moved so far from unit length that float64 would refuse them."""
    return (anchors.double().norm(dim=1) - 1).abs() > 0.9 * tolerance(torch.float64)


def draw(m: int, M: int, D: int, stored: torch.dtype, way: str, kind: str) -> tuple[Tensor, Tensor, Tensor, CrossBatchMemory]:
    """Draws anchors (rounded to the memory's type), labels, ids and a memory: classes of 2 to 60 rows, some rows empty."""
    update = "backprop" if way == "rows" else "queue"
    classes = max(2, M // random.choice((2, 5, 60)))
    centres = torch.randn(classes, D, device="cuda") + random.choice((0.0, 0.7, 1.0)) * torch.randn(D, device="cuda")
    noise = random.choice((0.6, 1.0, 1.6))
    row_labels = torch.randint(0, classes, (M,), device="cuda") + (random.choice((0, 1)) << 35)
    looks = torch.where(
        torch.rand(M, device="cuda") < 0.2, torch.randint(0, classes, (M,), device="cuda"), (row_labels % (1 << 35)) % classes
    )
    rows = F.normalize(centres[looks] + noise * torch.randn(M, D, device="cuda")).to(stored)  # a fifth looks like another class
    labels = row_labels[torch.randint(0, M, (m,), device="cuda")]
    anchors = F.normalize(centres[(labels % (1 << 35)) % classes] + noise * torch.randn(m, D, device="cuda"))
    anchors = F.normalize(anchors).to(stored).float()
    while bool((off := far_from_unit_length(anchors)).any()):
        anchors[off] = F.normalize(anchors[off] + 0.1 * torch.randn_like(anchors[off])).to(stored).float()
    ids = torch.randint(0, M if update != "queue" else 2 * M, (m,), device="cuda")
    memory = CrossBatchMemory(M, D, update, dtype=stored, device="cuda")
    with torch.no_grad():
        memory.rows.copy_(rows)
    memory.row_labels.copy_(row_labels)
    memory.row_ids.copy_(torch.arange(M) if update != "queue" else torch.randint(0, 2 * M, (M,)))
    memory.stamps.copy_(torch.where(torch.rand(M) < 0.1, -1, 1))
    memory.pointer.fill_(random.randrange(M))
    memory.count.copy_((memory.stamps >= 0).sum())
    memory.clock.fill_(1)
    if way == "newest":
        memory.enqueue(anchors, labels)
    return anchors, labels, ids, memory


def ids_and_exclude(ids: Tensor, way: str) -> tuple[Tensor | None, str]:
    """Returns the arguments of a loss by which pairs of the same image are left out."""
    return None if way == "newest" else ids, "instance" if way in ("instance", "rows") else "copy"


def clear_of_thresholds(kind: str, v: Tensor, labels: Tensor, ids: Tensor, memory: CrossBatchMemory, way: str) -> bool:
    """Clears rows until no pair is closer than CLEAR to the threshold at which it starts or stops to count."""
    for _ in range(6):
        wide = widened(memory)
        pairing = pair(v.double(), labels, wide, *ids_and_exclude(ids, way))
        positive, negative = pairing.masks()  # (M, m)
        S = wide.rows.detach() @ v.double().T
        inf = torch.inf
        lowest = S.masked_fill(~positive, inf).amin(0)
        highest = S.masked_fill(~negative, -inf).amax(0)
        if kind in REDUCTIONS:
            close = negative & ((S - 0.3).abs() < CLEAR)
        elif kind == "multi_similarity":
            close = negative & ((S - (lowest - 0.1)).abs() < CLEAR) | positive & ((S - (highest + 0.1)).abs() < CLEAR)
        else:
            close = torch.zeros_like(negative)
            for i in range(len(v)):
                thresholds = (S[positive[:, i], i] - 0.1).sort().values
                if len(thresholds):
                    index = torch.searchsorted(thresholds, S[:, i].contiguous())
                    for k in (index.clamp(max=len(thresholds) - 1), (index - 1).clamp(min=0)):
                        close[:, i] |= negative[:, i] & ((thresholds[k] - S[:, i]).abs() < CLEAR)
        rows = close.any(1)
        if not bool(rows.any()):
            return True
        if way == "newest":
            return False
        memory.stamps[rows] = -1
    return False


def widened(memory: CrossBatchMemory) -> CrossBatchMemory:
    wide = CrossBatchMemory(memory.size, memory.dim, memory.update, dtype=torch.float64, device="cuda")
    wide.load_state_dict({k: b.double() if k == "rows" else b for k, b in memory.state_dict().items()})
    return wide


def relative(value: Tensor, expected: Tensor) -> float:
    size = float(expected.norm())
    return float((value.double() - expected).norm()) / max(size, 1e-8)


def one(kind: str, D: int, stored: torch.dtype, way: str) -> dict[str, Any] | None:
    """Checks one random shape. Returns None if too many pairs are close to a threshold."""
    m = random.choice((1, 2, 7, 33, 64, 65, 130))
    M = random.choice((1, 3, 31, 64, 65, 127, 700, 1501, 3001)) if way != "batch" else m
    if kind == "triplet":
        m, M = min(m, 65), min(M, 1501)
    anchors, labels, ids, memory = draw(m, max(M, 1), D, stored, way, kind)
    bank = memory if way != "batch" else None
    if bank is not None:
        if not clear_of_thresholds(kind, anchors, labels, ids, memory, way):
            return None
        inputs = anchors
    else:
        inputs = anchors.to(stored)
    results = []
    for engine in ("reference", "triton"):
        wide = engine == "reference"
        v = inputs.double().detach() if wide else inputs.detach().clone()
        v.requires_grad_()
        store = None if bank is None else widened(memory) if wide else memory
        memory.rows.grad = None
        used_ids, exclude = ids_and_exclude(ids, way)
        loss, stats = loss_of(kind, engine)(v, labels, store, ids=used_ids, exclude=exclude, return_stats=True)
        loss.backward()
        results.append((loss.detach(), v.grad, None if store is None else store.rows.grad, stats))
    (value, gradient, row_gradient, stats), (loss, our_gradient, our_row_gradient, our_stats) = results
    counts = all(torch.equal(our_stats[n], stats[n]) for n in ("valid_positives", "valid_negatives"))
    extremes = all(
        torch.allclose(our_stats[n].double(), stats[n].double(), atol=1e-5)
        for n in ("hardest_negative", "easiest_positive", "hardest_positive")
    )
    return {
        "kind": kind, "D": D, "type": str(stored), "way": way, "m": m, "M": M,
        "small": steps.SMALL > 0, "valid_negatives": int(stats.valid_negatives.sum()),
        "loss": abs(float(loss) - float(value)) / max(abs(float(value)), 1e-6),
        "gradient": relative(our_gradient, gradient),
        "rows": 0.0 if row_gradient is None else relative(our_row_gradient, row_gradient),
        "counts": counts, "extremes": extremes, "unsound": int(our_stats.unsound),
    }  # fmt: skip


def good(case: dict[str, Any]) -> bool:
    stored = {str(t): t for t in TYPES}[case["type"]]
    limit = LIMIT[stored]
    if case["way"] == "batch" and stored != torch.float32:
        limit = 1e-2 if stored == torch.bfloat16 else 2e-3  # the gradient itself has that type
    rows = 1e-2 if stored != torch.float32 else limit
    return case["loss"] <= limit and case["gradient"] <= limit and case["rows"] <= rows and case["counts"] and case["extremes"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=110)
    a = parser.parse_args()
    begun, cases = time.time(), []
    combinations = list(itertools.product(WIDTHS, TYPES, KINDS))
    random.Random(0).shuffle(combinations)
    for number, (D, stored, kind) in list(enumerate(combinations))[a.part :: a.of]:
        if time.time() - begun > a.seconds:
            break
        random.seed(number)
        torch.manual_seed(number)
        way = WAYS[number % len(WAYS)]
        steps.SMALL = 0 if number % 2 else ROWS_OF_A_SMALL_BANK
        for _ in range(a.shapes):
            try:
                for _ in range(5):
                    if (case := one(kind, D, stored, way)) is not None:
                        cases.append({**case, "good": good(case)})
                        break
            except Exception:
                cases.append({"kind": kind, "D": D, "type": str(stored), "way": way, "error": traceback.format_exc()[-1500:]})
        a.out.write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
