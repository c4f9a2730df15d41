"""Evaluation as a plain double loop: slow, and plain enough to be read as the definition."""

import math
from typing import Any, NamedTuple


def similarity(a, b):
    length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def ranking(query, gallery, left_out):
    """Gallery indices, best first, of equal ones the lower first."""
    scores = [similarity(query, row) for row in gallery]
    return sorted((g for g in range(len(gallery)) if g not in left_out), key=lambda g: (-scores[g], g))


def evaluate(embeddings, labels, gallery=None, gallery_labels=None, ids=None, gallery_ids=None, ks=(1, 10, 100, 1000)):
    if gallery is None:
        ids = list(range(len(labels))) if ids is None else ids
        gallery, gallery_labels, gallery_ids = embeddings, labels, ids
    sums = {f"recall@{k}": 0.0 for k in ks} | {"map@r": 0.0, "r_precision": 0.0, "map": 0.0}
    queries = 0
    for q, query in enumerate(embeddings):
        left_out = set() if ids is None else {g for g, key in enumerate(gallery_ids) if key == ids[q]}
        hits = [gallery_labels[g] == labels[q] for g in ranking(query, gallery, left_out)]
        R = sum(hits)
        if R == 0:
            continue
        queries += 1
        for k in ks:
            sums[f"recall@{k}"] += any(hits[:k])
        sums["r_precision"] += sum(hits[:R]) / R
        precision = [sum(hits[: i + 1]) / (i + 1) if hit else 0.0 for i, hit in enumerate(hits)]
        sums["map@r"] += sum(precision[:R]) / R
        sums["map"] += sum(precision) / R
    means = {name: value / queries for name, value in sums.items()} if queries else {}
    return means | {"queries": queries, "without_relevant": len(labels) - queries}


class Labels:
    """As much of a set of images as scoring reads."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)


class Protocol(NamedTuple):
    name: str
    query: Any
    ks: tuple[int, ...]
    gallery: Any = None
    one_per_class: int = 0
