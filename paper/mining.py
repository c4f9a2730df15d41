"""What a finished run mines and retrieves, as positions in its data set: the pictures are opened when the page is drawn."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from xbm_app.train.job import Job

ANCHORS = 16  # of each kind: enough for some of different classes
NEGATIVES = 10
HARD, VERY_HARD = 0.5, 0.8  # the supplementary's figures 2 and 3
QUERIES, RESULTS = 400, 5  # drawn at random, the same in every run on the same data


@torch.no_grad()
def mined_negatives(job: Job, seed: int = 0) -> dict[str, Any]:
    """Anchors of one more batch with their negatives, as the supplementary's figures 2 and 3 show them.

    uniform: anchors drawn at random from those with enough negatives above 0.5 in the memory, negatives taken evenly over
        their sorted similarities; beside them what the batch itself offers.
    hardest: anchors drawn at random from those whose hardest negative passes 0.8, with the ten hardest.
    """
    indices = job.sampler.batch(job.batches_per_step * job.config.optim.iterations)
    labels = torch.from_numpy(np.asarray(job.dataset.train.labels))
    job.model.eval()
    anchors = job.model(job.feed.test(indices).to(job.device)).float().cpu()
    if job.memory is None or not len(job.memory):
        return {"uniform": [], "hardest": []}
    bank, bank_ids = job.memory.embeddings.float().cpu(), job.memory.ids.cpu()
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed)).tolist()
    found: dict[str, list[dict[str, Any]]] = {"uniform": [], "hardest": []}
    for a in order:
        own = int(indices[a])
        others = (labels == labels[own]).nonzero()[:, 0]
        positive = int(others[others != own][0]) if len(others) > 1 else own
        shared = {
            "anchor": own,
            "positive": positive,
            "batch": _sorted(anchors[a], anchors, torch.from_numpy(indices), labels, own)[:NEGATIVES],
        }
        memory = _sorted(anchors[a], bank, bank_ids, labels, own)
        hard = [pair for pair in memory if pair[1] > HARD]
        if len(hard) >= NEGATIVES and len(found["uniform"]) < ANCHORS:
            even = np.linspace(0, len(hard) - 1, NEGATIVES).round().astype(int)
            found["uniform"].append({**shared, "memory": [hard[k] for k in even], "above": len(hard)})
        if memory and memory[0][1] > VERY_HARD and len(found["hardest"]) < ANCHORS:
            found["hardest"].append({**shared, "memory": memory[:NEGATIVES], "above": len(hard)})
    return found


def _sorted(anchor: Tensor, pool: Tensor, ids: Tensor, labels: Tensor, own: int) -> list[tuple[int, float]]:
    """(image, similarity) of the negatives in a pool, hardest first; an image that is there twice counts once."""
    negative = labels[ids] != labels[own]
    s, ids = pool[negative] @ anchor, ids[negative]
    best: dict[int, float] = {}
    for image, similarity in zip(*(each[s.argsort(descending=True)].tolist() for each in (ids, s))):
        best.setdefault(image, round(similarity, 4))
    return list(best.items())


def retrieved(neighbours: np.ndarray, similarities: np.ndarray, job: Job, seed: int = 0) -> dict[str, Any]:
    """What some queries retrieve: the same queries, drawn at random, in every run on the same data.

    Args:
        neighbours: (Q, k) positions in the gallery, nearest first, and `similarities` (Q, k), of all queries.
    """
    protocol = job.dataset.protocols[0]
    gallery = protocol.query if protocol.gallery is None else protocol.gallery
    count = len(protocol.query)
    picked = np.random.default_rng(seed).permutation(count)[:QUERIES]
    near = neighbours[picked][:, :RESULTS]
    right = np.asarray(gallery.labels)[near] == np.asarray(protocol.query.labels)[picked][:, None]
    return {
        "queries": picked.tolist(),
        "neighbours": near.tolist(),
        "similarities": np.round(similarities[picked][:, :RESULTS].astype(float), 3).tolist(),
        "right": right.astype(int).tolist(),
    }
