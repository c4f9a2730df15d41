"""Time of one step against a memory of 1,000,000 × 512 in bfloat16 on a CPU, and peak memory of the whole process.

python -m benchmarks.million
"""

import resource
import time

import torch
import torch.nn.functional as F

from xbm import ContrastiveLoss, CrossBatchMemory, MultiSimilarityLoss, TripletLoss

ROWS, DIM, ANCHORS = 1_000_000, 512, 64


def main() -> None:
    torch.manual_seed(0)
    memory = CrossBatchMemory(ROWS, DIM, dtype=torch.bfloat16)
    for start in range(0, ROWS, 8192):
        ids = torch.arange(start, min(ROWS, start + 8192))
        memory.enqueue(F.normalize(torch.randn(len(ids), DIM), dim=1), ids // 5, ids)
    v = F.normalize(torch.randn(ANCHORS, DIM), dim=1).requires_grad_()
    labels, ids = torch.arange(ANCHORS) // 4, torch.arange(ANCHORS)
    memory.enqueue(v.detach(), labels, ids)
    for loss_fn in (ContrastiveLoss(margin=0.15), MultiSimilarityLoss(), TripletLoss()):
        begun = time.perf_counter()
        loss, stats = loss_fn(v, labels, memory, ids=ids, return_stats=True)
        loss.backward()
        seconds = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        valid = int(stats.valid_negatives.sum())
        print(f"{loss_fn.name}: {seconds:.2f} s, {valid:,} valid negatives, peak of the whole process {peak:.2f} GB")


if __name__ == "__main__":
    main()
