"""Compares every kernel on the GPU with float64 on random odd shapes; inputs are at least 1e-4 from every threshold.

    python -m benchmarks.gpu_check --part 0 --of 12 --out FILE

gpu_losses.py starts all parts at once, since most of the time is spent compiling. Under TRITON_INTERPRET=1 this runs on a CPU,
with small shapes and without bfloat16, whose products the interpreter gets wrong: that checks this program, and the formulas.
"""

import argparse
import importlib
import itertools
import json
import random
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm import (
    CircleLoss,
    ContrastiveLoss,
    CrossBatchMemory,
    LiftedStructureLoss,
    MarginLoss,
    MultiSimilarityLoss,
    NPairsLoss,
    SupConLoss,
    TripletLoss,
)
from xbm.checks import tolerance
from xbm.engine.pairing import References, pair
from xbm.kernels import INTERPRETED
from xbm.losses import PairLoss

DEVICE = "cpu" if INTERPRETED else "cuda"
WIDTHS = (16, 19, 64) if INTERPRETED else (16, 64, 100, 128, 129, 256, 512, 768, 2048)
TYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
REDUCTIONS = {"contrastive": "sum", "averaged": "mean", "balanced": "balanced"}  # of the contrastive loss
LOSSES: dict[str, Callable[..., PairLoss]] = {
    **{kind: partial(ContrastiveLoss, 0.3, reduction=reduction) for kind, reduction in REDUCTIONS.items()},
    "multi_similarity": MultiSimilarityLoss,
    "triplet": partial(TripletLoss, 0.1),
    "sup_con": SupConLoss,
    "sup_con_sharp": partial(SupConLoss, 0.01),
    "sup_con_learned": partial(SupConLoss, 0.05, learn_temperature=True),
    "lifted_structure": LiftedStructureLoss,
    "n_pairs": NPairsLoss,
    "margin": MarginLoss,
    "margin_averaged": partial(MarginLoss, reduction="mean"),
    "margin_balanced": partial(MarginLoss, reduction="balanced"),
    "circle": CircleLoss,
}
KINDS = tuple(LOSSES)
WAYS = ("instance", "copy", "newest", "batch", "rows", "references")
# Where a loss multiplies similarities by so much that rounding them to float32 costs more than the usual 1e-5: |∂logit/∂S|
# times 1e-7, or 1/d² of the closest pair that is left.
SHARPNESS = {"sup_con_sharp": 10.0, "circle": 10.0, "margin": 3.0, "margin_averaged": 3.0, "margin_balanced": 3.0}
SOFTMAX = {"sup_con": 10.0, "sup_con_sharp": 100.0, "sup_con_learned": 20.0, "n_pairs": 10.0}  # 1/τ
NEAREST = 0.98  # the similarity from which 1/d, the margin loss's weight, is too steep to compare
steps = importlib.import_module("xbm.engine.triton.plan")
ROWS_OF_A_SMALL_BANK = steps.SMALL  # every other case takes the path of large memories
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
CLEAR = 1e-4


def loss_of(kind: str, engine: str) -> PairLoss:
    return LOSSES[kind](engine=engine).to(DEVICE, torch.float64 if engine == "reference" else torch.float32)


def far_from_unit_length(anchors: Tensor) -> Tensor:
    """Marks anchors that rounding to a half type has moved so far from unit length that float64 would refuse them."""
    return (anchors.double().norm(dim=1) - 1).abs() > 0.9 * tolerance(torch.float64)


def draw(m: int, M: int, D: int, stored: torch.dtype, way: str, kind: str) -> tuple[Tensor, Tensor, Tensor, CrossBatchMemory]:
    """Draws anchors (rounded to the memory's type), labels, ids and a memory: classes of 2 to 60 rows, some rows empty."""
    update = "backprop" if way == "rows" else "queue"
    classes = max(2, M // random.choice((2, 5, 60)))
    centres = torch.randn(classes, D, device=DEVICE) + random.choice((0.0, 0.7, 1.0)) * torch.randn(D, device=DEVICE)
    noise = random.choice((0.6, 1.0, 1.6))
    row_labels = torch.randint(0, classes, (M,), device=DEVICE) + (random.choice((0, 1)) << 35)
    looks = torch.where(
        torch.rand(M, device=DEVICE) < 0.2, torch.randint(0, classes, (M,), device=DEVICE), (row_labels % (1 << 35)) % classes
    )
    rows = F.normalize(centres[looks] + noise * torch.randn(M, D, device=DEVICE)).to(stored)  # a fifth looks like another class
    labels = row_labels[torch.randint(0, M, (m,), device=DEVICE)]
    anchors = F.normalize(centres[(labels % (1 << 35)) % classes] + noise * torch.randn(m, D, device=DEVICE))
    anchors = F.normalize(anchors).to(stored).float()
    while bool((off := far_from_unit_length(anchors)).any()):
        anchors[off] = F.normalize(anchors[off] + 0.1 * torch.randn_like(anchors[off])).to(stored).float()
    ids = torch.randint(0, M if update != "queue" else 2 * M, (m,), device=DEVICE)
    memory = CrossBatchMemory(M, D, update, dtype=stored, device=DEVICE)
    with torch.no_grad():
        memory.rows.copy_(rows)
    memory.row_labels.copy_(row_labels)
    memory.row_ids.copy_(torch.arange(M) if update != "queue" else torch.randint(0, 2 * M, (M,)))
    memory.stamps.copy_(torch.where(torch.rand(M) < 0.1, -1, 1))
    memory.pointer.fill_(random.randrange(M))
    memory.count.copy_((memory.stamps >= 0).sum())
    memory.clock.fill_(1)
    memory.latest.fill_(update == "queue")  # what tells a queue's state from another's
    if way == "newest":
        memory.enqueue(anchors, labels)
    return anchors, labels, ids, memory


def references_for(labels: Tensor, D: int) -> References:
    """Draws live rows: some of an anchor's class, some of none, with ids that are nobody's."""
    r = random.choice((1, 5, 40))
    of = torch.randint(0, len(labels), (r,), device=DEVICE)
    classes = torch.where(torch.rand(r, device=DEVICE) < 0.5, labels[of], labels[of] + (1 << 20))
    rows = F.normalize(torch.randn(r, D, device=DEVICE))
    return References(rows, classes, torch.arange(r, device=DEVICE) + (1 << 30))


def ids_and_exclude(ids: Tensor, way: str) -> tuple[Tensor | None, str]:
    """Returns the arguments of a loss by which pairs of the same image are left out."""
    return None if way == "newest" else ids, "instance" if way in ("instance", "rows", "references") else "copy"


def clear_of_thresholds(
    kind: str, v: Tensor, labels: Tensor, ids: Tensor, memory: CrossBatchMemory, way: str, live: References | None
) -> bool:
    """Clears rows until no pair is closer than CLEAR to the threshold at which it starts or stops to count."""
    for _ in range(6):
        wide = widened(memory)
        r = 0 if live is None else len(live.rows)
        pairing = pair(v.double(), labels, wide, *ids_and_exclude(ids, way), references=live)
        positive, negative = pairing.masks()  # (r + M, m)
        S = wide.rows.detach() @ v.double().T
        if live is not None:
            S = torch.cat([live.rows.double() @ v.double().T, S])
        inf = torch.inf
        lowest = S.masked_fill(~positive, inf).amin(0)
        highest = S.masked_fill(~negative, -inf).amax(0)
        if kind in REDUCTIONS:
            close = negative & ((S - 0.3).abs() < CLEAR)
        elif kind == "multi_similarity":
            close = negative & ((S - (lowest - 0.1)).abs() < CLEAR) | positive & ((S - (highest + 0.1)).abs() < CLEAR)
        elif kind.startswith("margin"):
            close = (positive | negative) & (S > NEAREST)
            close |= negative & ((S - (1 - 1.4**2 / 2)).abs() < CLEAR) | positive & ((S - (1 - 1.0**2 / 2)).abs() < CLEAR)
        elif kind == "circle":
            close = negative & ((S + 0.25).abs() < CLEAR)
        elif kind == "lifted_structure":
            total = S.masked_fill(~negative, -inf).logsumexp(0) + (-S).masked_fill(~positive, -inf).logsumexp(0)
            close = negative & (total.abs() < CLEAR)
        elif kind in SOFTMAX:
            close = torch.zeros_like(negative)
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
        if way == "newest" or bool(rows[:r].any()):
            return False
        memory.stamps[rows[r:]] = -1
    return False


def widened(memory: CrossBatchMemory) -> CrossBatchMemory:
    wide = CrossBatchMemory(memory.size, memory.dim, memory.update, dtype=torch.float64, device=DEVICE)
    wide.load_state_dict({k: b.double() if k == "rows" else b for k, b in memory.state_dict().items()})
    return wide


def relative(value: Tensor, expected: Tensor, least: float = 1e-8) -> float:
    size = float(expected.norm())
    return float((value.double() - expected).norm()) / max(size, least)


def on_their_own(v: Tensor, live: References | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Copies of the anchors and references that are leaves of a graph."""
    rows = None if live is None else live.rows.to(dtype).clone().requires_grad_()
    return v.to(dtype).clone().requires_grad_(), rows


def one(kind: str, D: int, stored: torch.dtype, way: str) -> dict[str, Any] | None:
    """Checks one random shape. Returns None if too many pairs are close to a threshold."""
    m = random.choice((1, 2, 7) if INTERPRETED else (1, 2, 7, 33, 64, 65, 130))
    M = random.choice((1, 3, 31, 64, 65, 127) if INTERPRETED else (1, 3, 31, 64, 65, 127, 700, 1501, 3001))
    M = m if way == "batch" else M
    if kind == "triplet":
        m, M = min(m, 65), min(M, 1501)
    anchors, labels, ids, memory = draw(m, max(M, 1), D, stored, way, kind)
    bank = memory if way != "batch" else None
    live = references_for(labels, D) if way == "references" else None
    if live is not None:  # the kernels round them to the memory's type
        live = live._replace(rows=live.rows.to(stored).float())
        while bool((off := far_from_unit_length(live.rows)).any()):
            live.rows[off] = F.normalize(live.rows[off] + 0.1 * torch.randn_like(live.rows[off])).to(stored).float()
    if bank is not None:
        if not clear_of_thresholds(kind, anchors, labels, ids, memory, way, live):
            return None
        inputs = anchors
    else:
        inputs = anchors.to(stored)
    results = []
    for engine in ("reference", "triton"):
        wide = engine == "reference"
        v, references = on_their_own(inputs.detach(), live, torch.float64 if wide else inputs.dtype)
        store = None if bank is None else widened(memory) if wide else memory
        memory.rows.grad = None
        used_ids, exclude = ids_and_exclude(ids, way)
        named = {} if live is None else {
            "references": references, "reference_labels": live.labels, "reference_ids": live.ids
        }  # fmt: skip
        loss_fn = loss_of(kind, engine)
        loss, stats = loss_fn(v, labels, store, ids=used_ids, exclude=exclude, return_stats=True, **named)
        loss.backward()
        slope = None if loss_fn.log_temperature is None else loss_fn.log_temperature.grad
        of_rows = references.grad if references is not None else None if store is None else store.rows.grad
        results.append((loss.detach(), v.grad, of_rows, slope, stats))
    (value, gradient, row_gradient, slope, stats), (loss, our_gradient, our_row_gradient, our_slope, our_stats) = results
    # where a softmax is nearly all on one positive, what is left of its weight 1 − π is as exact as the 1
    least = 1e-2 * SOFTMAX.get(kind, 1e-6) / m**0.5
    counts = all(torch.equal(our_stats[n], stats[n]) for n in ("valid_positives", "valid_negatives"))
    extremes = all(
        torch.allclose(our_stats[n].double(), stats[n].double(), atol=1e-5)
        for n in ("hardest_negative", "easiest_positive", "hardest_positive")
    )
    return {
        "kind": kind, "D": D, "type": str(stored), "way": way, "m": m, "M": M,
        "small": steps.SMALL > 0, "valid_negatives": int(stats.valid_negatives.sum()),
        "loss": abs(float(loss) - float(value)) / max(abs(float(value)), 1e-6 if least < 1e-7 else 0.1),
        "gradient": relative(our_gradient, gradient, least),
        "rows": 0.0 if row_gradient is None else relative(our_row_gradient, row_gradient, 10 * least),  # S is computed again
        "slope": 0.0 if slope is None else relative(our_slope, slope, 0.1),
        "counts": counts, "extremes": extremes, "unsound": int(our_stats.unsound),
    }  # fmt: skip


def good(case: dict[str, Any]) -> bool:
    stored = {str(t): t for t in TYPES}[case["type"]]
    limit = max(LIMIT[stored], SHARPNESS.get(case["kind"], 1.0) * LIMIT[torch.float32])
    if case["way"] == "batch" and stored != torch.float32:
        limit = 1e-2 if stored == torch.bfloat16 else 2e-3  # the gradient itself has that type
    rows = 1e-2 if stored != torch.float32 else limit
    close = case["loss"] <= limit and case["gradient"] <= limit and case["rows"] <= rows and case["slope"] <= 10 * limit
    return close and case["counts"] and case["extremes"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    a = parser.parse_args()
    begun, cases = time.time(), []
    combinations = list(itertools.product(WIDTHS, TYPES, a.kinds))
    random.Random(0).shuffle(combinations)
    for number, (D, stored, kind) in list(enumerate(combinations))[a.part :: a.of]:
        if time.time() - begun > a.seconds:
            break
        random.seed(number)
        torch.manual_seed(number)
        way = WAYS[number % len(WAYS)]
        steps.SMALL = 0 if number // len(WAYS) % 2 else ROWS_OF_A_SMALL_BANK
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
