"""Bytes sent per step, as the ranks count them, are those of the table in docs/scale.md."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.scale import Step, bytes_table, table
from tests.known import NAMES
from tests.worlds import on_ranks
from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory, ShardedMemory
from xbm.losses import LOSSES

M, D = 41, 6  # rows, dimension
UPDATES = ("queue", "moving_average", "backprop")
CASES = list(product(("replicated", "sharded"), UPDATES, NAMES, ("instance", "copy"), (False, True)))


def anchors(world: int) -> int:
    """Of all ranks; the last one has fewer."""
    return 4 * world - 1


def sent(cases: list[tuple]) -> list[tuple[int, tuple[int, int]]]:
    """The bytes of one step of each case, and the most positives that an anchor has in a shard and in all of them."""
    found = []
    world = Ranks().world
    everyone = torch.arange(anchors(world))
    same = (everyone[:, None] % 3 == everyone % 3) & (everyone[:, None] != everyone)  # anchors × slots: slot = id here
    most = max(int(same[:, r::world].sum(1).max()) for r in range(world))
    for mode, update, loss, exclude, stats in cases:
        ranks = Ranks()
        memory = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}[mode](M, D, update, ranks=ranks)
        loss_fn = GlobalLoss(LOSSES[loss](exclude=exclude), ranks)
        ids = everyone.split(4)[ranks.rank]
        labels = ids % 3
        v = F.normalize(torch.randn(len(ids), D)).requires_grad_()
        memory.enqueue(v.detach(), labels, ids)
        value = loss_fn(v, labels, memory, ids=ids, return_stats=stats)
        (value[0] if stats else value).backward()
        memory.step()
        found.append((ranks.sent.total(), (most, int(same.sum(1).max()))))
    return found


@pytest.mark.parametrize("world", [2, *(pytest.param(R, marks=pytest.mark.slow) for R in (1, 3, 4))])
def test_counted_bytes_are_the_tables(world):
    step = Step(world, M, D, anchors(world))
    cases = CASES if world != 2 else CASES[::5]  # each of the five things with each other one
    for counts in on_ranks(world, sent, cases):
        for (mode, update, loss, exclude, stats), (counted, most) in zip(cases, counts, strict=True):
            if mode == "replicated":
                expected = step.replicated(update)
            else:
                expected = step.sharded(loss, exclude == "copy", update != "queue", most, stats)
            assert counted == expected, (mode, update, loss, exclude, stats)


def test_the_document_shows_the_table_as_it_is_made():
    text = (Path(__file__).parents[3] / "docs" / "scale.md").read_text()
    for line in [*bytes_table(), *table()]:
        assert line in text, f"run `python -m benchmarks.scale` and put its tables into docs/scale.md: {line}"
