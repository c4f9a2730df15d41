"""A bank cut into shards, each with a holder in a thread of its own, gives what the whole bank gives."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from tests.known import NAMES
from xbm.engine import streaming
from xbm.engine.pairing import Pairing
from xbm.losses import LOSSES


class Threads:
    """Holders that hand each other tensors through a list."""

    def __init__(self, rank: int, table: list, meet: Barrier) -> None:
        self.rank, self.table, self.meet = rank, table, meet

    def everyone(self, x, why):
        self.table[self.rank] = x
        self.meet.wait()
        found = list(self.table)
        self.meet.wait()
        return found

    def maximum(self, x, why):
        return torch.stack(self.everyone(x, why)).amax(0)

    def sum(self, x, why):
        return torch.stack(self.everyone(x, why)).sum(0)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_three_shards_are_one_bank(name, listed, monkeypatch):
    if not listed:
        monkeypatch.setattr(streaming, "MOST_LISTED", -1)
    m, M, D, R = 7, 53, 6, 3
    v, rows = (F.normalize(torch.randn(n, D, dtype=torch.float64)) for n in (m, M))
    labels, row_labels = torch.randint(0, 3, (m,)), torch.randint(0, 3, (M,))
    row_labels[0::R] = row_labels[0::R].clamp(max=1)  # a shard without any positive of some anchors
    stamps = torch.arange(M) - 4  # some never written
    ids, row_ids = torch.randint(0, 20, (m,)), torch.randint(0, 20, (M,))
    whole = Pairing(rows, row_labels, stamps, labels, torch.ones(m, dtype=torch.bool), ids, row_ids)
    loss = LOSSES[name]()
    expected = streaming.compare(loss, v, whole, row_gradient=True, stats=True)
    table, meet = [None] * R, Barrier(R, timeout=30)

    def hold(rank: int):
        cut = slice(rank, None, R)
        about = {name: getattr(whole, name)[cut].clone() for name in ("rows", "row_labels", "stamps", "row_ids")}
        mine = whole._replace(**about)
        return streaming.compare(loss, v, mine, True, True, True, Threads(rank, table, meet))

    with ThreadPoolExecutor(R) as pool:
        found = list(pool.map(hold, range(R)))
    torch.testing.assert_close(sum(f.gradient for f in found), expected.gradient)
    for rank, each in enumerate(found):
        torch.testing.assert_close(each.loss, expected.loss)
        torch.testing.assert_close(each.row_gradient, expected.row_gradient[rank::R])
        for mine, theirs in zip(each.statistics, expected.statistics):
            torch.testing.assert_close(mine, theirs)
