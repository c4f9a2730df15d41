"""Counting and listing positives: every place once, in order, extremes too."""

import torch
from interpreted import memory_with

from xbm.engine.triton import positives
from xbm.engine.triton.tiles import GIVEN_SLOT


def test_lists_hold_every_positive_once_in_the_order_of_the_rows():
    anchors, labels, ids, memory = memory_with(m=3, M=83, D=17)
    own = torch.tensor([int((memory.row_labels == labels[0]).nonzero()[0]), -1, -1])
    m, M, per, scans, cap = 3, 83, 32, 3, 50
    counts = torch.full((m, scans), -1, dtype=torch.int32)
    lowest, highest, listed = torch.zeros(m, scans), torch.zeros(m, scans), torch.zeros(m, cap)
    places, beaten = (torch.full((m, cap), -1, dtype=torch.int32) for _ in range(2))
    who = (memory.row_labels, memory.stamps, memory.row_ids, labels, ids, own, None)
    flags = (True, GIVEN_SLOT.value)
    positives.count[(1, scans)](*who, counts, m, M, per, scans, *flags, 16, 32, 16)
    out = (lowest, highest, listed, places, beaten)
    v, rows = anchors.detach(), memory.rows
    positives.enlist[(1, scans)](v, rows, *who, counts, *out, m, M, per, scans, cap, *flags, 17, 16, 32, 16, 16, "ieee")
    S = v @ rows.T
    for i in range(m):
        expected = [
            j for j in range(M)
            if memory.row_labels[j] == labels[i] and memory.stamps[j] >= 0 and memory.row_ids[j] != ids[i] and j != own[i]
        ]  # fmt: skip
        n = int(counts[i].sum())
        assert places[i, :n].tolist() == expected and (places[i, n:] == -1).all()
        assert torch.allclose(listed[i, :n], S[i, expected]) and (beaten[i, :n] == 0).all()
        if expected:
            assert torch.isclose(lowest[i].min(), S[i, expected].min()) and torch.isclose(
                highest[i].max(), S[i, expected].max()
            )
        else:
            assert (lowest[i] == torch.inf).all() and (highest[i] == -torch.inf).all()
    assert max(int(counts[i].sum()) for i in range(m)) > 5
