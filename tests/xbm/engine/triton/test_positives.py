"""Counting and listing positives: every place once, in order, extremes too."""

import torch

from tests.xbm.engine.triton.interpreted import memory_with
from xbm.engine.triton import positives
from xbm.engine.triton.tiles import GIVEN_SLOT


def test_lists_hold_every_positive_once_in_the_order_of_the_rows():
    anchors, labels, ids, memory = memory_with(m=3, M=83, D=17)
    own = torch.tensor([int((memory.row_labels == labels[0]).nonzero()[0]), -1, -1])
    m, M, per, scans = 3, 83, 32, 3
    for cap, places_in_table, group, block in ((50, 64, 1, 16), (2, 64, 2, 16), (50, 1, 5, 16), (50, 64, 1, 32)):
        counts = torch.full((m, scans), -1, dtype=torch.int32)
        totals, lowest, highest, listed = torch.zeros(m, dtype=torch.int32), torch.zeros(m), torch.zeros(m), torch.zeros(m, cap)
        places, beaten = (torch.full((m, cap), -1, dtype=torch.int32) for _ in range(2))
        who = (memory.row_labels, memory.stamps, memory.row_ids, labels, ids, own, None)
        flags = (True, GIVEN_SLOT.value)
        table = torch.full((places_in_table,), 7, dtype=torch.int16)
        positives.mark[(1 + 3,)](labels, table, counts, m, scans, places_in_table, 2, 4 if places_in_table > 1 else 1)
        if places_in_table > 1:
            assert (counts == 0).all()
            assert {int(x) for x in table} <= {0, -1, 1, 2, 3} and (table != 0).sum() <= len(labels.unique())
        else:
            counts.zero_()
            assert table.tolist() == [-1 if len(labels.unique()) > 1 else 1]
        positives.count[(6,)](memory.row_labels, labels, table, counts, m, M, per, scans, places_in_table, 16)
        out = (totals, lowest, highest, listed, places, beaten)
        v, rows = anchors.detach(), memory.rows
        positives.enlist[(m,)](
            v,
            rows,
            *who,
            table,
            counts,
            *out,
            m,
            M,
            per,
            scans,
            group,
            cap,
            *flags,
            17,
            places_in_table,
            4,
            block,
            8,
            16,
            per * group <= block,
        )
        S = v @ rows.T
        for i in range(m):
            expected = [
                j for j in range(M)
                if memory.row_labels[j] == labels[i] and memory.stamps[j] >= 0 and memory.row_ids[j] != ids[i] and j != own[i]
            ]  # fmt: skip
            n = min(len(expected), cap)
            assert totals[i] == len(expected)
            assert places[i, :n].tolist() == expected[:n] and (places[i, n:] == -1).all()
            assert torch.allclose(listed[i, :n], S[i, expected[:n]]) and (beaten[i, :n] == 0).all()
            if expected:
                assert torch.isclose(lowest[i], S[i, expected].min()) and torch.isclose(highest[i], S[i, expected].max())
            else:
                assert lowest[i] == torch.inf and highest[i] == -torch.inf
        assert int(totals.max()) > 5
