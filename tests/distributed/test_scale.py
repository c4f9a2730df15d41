"""Bytes sent per step, as the ranks count them, are those of the table in docs/scale.md."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.scale import Step, table

from worlds import on_ranks
from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory, ShardedMemory
from xbm.losses import LOSSES

M, D, SIZE = 41, 6, 4  # rows, dimension, anchors of each rank
CASES = [
    ("replicated", "queue", "contrastive", "instance"),
    ("replicated", "backprop", "multi_similarity", "instance"),
    ("sharded", "queue", "contrastive", "instance"),
    ("sharded", "queue", "contrastive", "copy"),
    ("sharded", "queue", "multi_similarity", "instance"),
    ("sharded", "backprop", "contrastive", "copy"),
    ("sharded", "queue", "triplet", "instance"),
]


def sent() -> list[tuple[int, tuple[int, int]]]:
    """The bytes of one step of each case, and the most positives that an anchor has in a shard and in all of them."""
    found = []
    for mode, update, loss, exclude in CASES:
        ranks = Ranks()
        memory = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}[mode](M, D, update, ranks=ranks)
        loss_fn = GlobalLoss(LOSSES[loss](exclude=exclude), ranks)
        draw = torch.Generator().manual_seed(ranks.rank)
        v = F.normalize(torch.randn(SIZE, D, generator=draw)).requires_grad_()
        ids = torch.arange(SIZE) + SIZE * ranks.rank
        labels = ids % 3
        memory.enqueue(v.detach(), labels, ids)
        value, _ = loss_fn(v, labels, memory, ids=ids, return_stats=True)
        value.backward()
        memory.step()
        everyone = torch.arange(SIZE * ranks.world)
        same = (everyone[:, None] % 3 == everyone % 3) & (everyone[:, None] != everyone)  # anchors × slots: slot = id here
        most = max(int(same[:, r :: ranks.world].sum(1).max()) for r in range(ranks.world))
        found.append((ranks.sent.total(), (most, int(same.sum(1).max()))))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_counted_bytes_are_the_tables(world):
    step = Step(world, M, D, SIZE * world)
    for counts in on_ranks(world, sent):
        for (mode, update, loss, exclude), (counted, most) in zip(CASES, counts):
            if mode == "replicated":
                expected = step.replicated(update)
            else:
                expected = step.sharded(loss, exclude == "copy", update != "queue", most)
            assert counted == expected, (mode, update, loss, exclude)


def test_the_document_shows_the_table_as_it_is_made():
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for line in table():
        assert line in text, f"run `python -m benchmarks.scale` and put its table into docs/scale.md: {line}"
