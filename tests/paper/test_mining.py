from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paper.mining import NEGATIVES, QUERIES, mined_negatives, retrieved
from xbm.memory import CrossBatchMemory


def job(rows, labels, anchors):
    """A run whose model answers with the rows given, whose bank holds all of them, and whose batch is `anchors`."""
    rows, labels = F.normalize(torch.tensor(rows, dtype=torch.float32)), np.array(labels)
    memory = CrossBatchMemory(len(rows), rows.shape[1])
    memory.enqueue(rows, torch.from_numpy(labels), torch.arange(len(rows)))
    return SimpleNamespace(
        sampler=SimpleNamespace(batch=lambda step: np.array(anchors)),
        batches_per_step=1,
        config=SimpleNamespace(optim=SimpleNamespace(iterations=1)),
        dataset=SimpleNamespace(train=SimpleNamespace(labels=labels)),
        model=Table(rows),
        feed=SimpleNamespace(test=lambda indices: torch.from_numpy(np.asarray(indices))),
        memory=memory,
        device=torch.device("cpu"),
    )


class Table(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, indices):
        return self.rows[indices]


def fan(angles):
    return [[np.cos(a), np.sin(a)] for a in angles]


def test_negatives_are_taken_evenly_from_hard_to_simple():
    """Image 0 and its positive 1 at angle 0; 31 negatives fan out: those within 60 degrees pass 0.5."""
    degrees = np.arange(1, 94, 3)
    found = mined_negatives(job(fan(np.radians([0, 0, *degrees])), [0, 0, *[1] * 31], [0]))
    (row,) = found["uniform"]
    hard = [2 + k for k, d in enumerate(degrees) if d < 60]
    assert row["anchor"] == 0 and row["positive"] == 1 and row["above"] == len(hard) == 20
    images = [image for image, _ in row["memory"]]
    assert len(images) == NEGATIVES and images[0] == hard[0] and images[-1] == hard[-1] and images == sorted(images)
    assert row["memory"][0][1] == pytest.approx(np.cos(np.radians(1)), abs=1e-4)
    (hardest,) = found["hardest"]
    assert [image for image, _ in hardest["memory"]] == hard[:NEGATIVES]


def test_only_anchors_with_hard_enough_negatives_are_shown():
    """The nearest negative is 50 degrees away: 0.64, and only two pass 0.5."""
    found = mined_negatives(job(fan(np.radians([0, 5, 50, 55, 80])), [0, 0, 1, 1, 1], [0]))
    assert found == {"uniform": [], "hardest": []}


def test_the_batchs_own_negatives_stand_beside_them():
    found = mined_negatives(job(fan(np.radians([0, 0, *range(1, 13)])), [0, 0, *[1] * 12], [0, 13, 5]))
    row = next(each for each in found["uniform"] if each["anchor"] == 0)
    assert [image for image, _ in row["batch"]] == [5, 13]


def test_without_a_memory_there_is_nothing_to_mine():
    made = job(fan([0, 1]), [0, 1], [0])
    made.memory = None
    assert mined_negatives(made) == {"uniform": [], "hardest": []}


def test_the_same_queries_in_every_run():
    count = QUERIES + 50
    query = SimpleNamespace(labels=np.arange(count) // 2, __len__=lambda: count)

    class Set(SimpleNamespace):
        def __len__(self):
            return count

    run = SimpleNamespace(dataset=SimpleNamespace(protocols=[SimpleNamespace(query=Set(labels=query.labels), gallery=None)]))
    near = np.stack([np.arange(count) ^ 1, np.zeros(count, int)], axis=1)
    one = retrieved(near, np.full((count, 2), 0.5), run)
    other = retrieved(near[:, ::-1], np.full((count, 2), 0.25), run)
    assert one["queries"] == other["queries"] and len(set(one["queries"])) == QUERIES
    assert all(right[0] == 1 for right in one["right"])  # the neighbour's number differs in the last bit: the same class
    assert one["neighbours"][3] == [one["queries"][3] ^ 1, 0] and other["similarities"][0] == [0.25, 0.25]
