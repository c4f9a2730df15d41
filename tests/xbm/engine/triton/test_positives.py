"""Counting and listing positives: every row once, in order, extremes too; and anchors with more than a list holds."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import LONG, LOSSES, check, memory_with
from xbm.engine.triton import plan, positives
from xbm.engine.triton.primitives import GIVEN_SLOT


def test_lists_hold_every_positive_once_in_the_order_of_the_rows():
    anchors, labels, ids, memory = memory_with(m=3, M=83, D=17)
    own = torch.tensor([int((memory.row_labels == labels[0]).nonzero()[0]), -1, -1])
    m, M, per, parts = 3, 83, 32, 3
    for cap, table_size, group, block in ((50, 64, 1, 16), (2, 64, 2, 16), (50, 1, 5, 16), (50, 64, 1, 32)):
        counts = torch.full((m, parts), -1, dtype=torch.int32)
        pos_counts, lowest, highest, pos_sims = (
            torch.zeros(m, dtype=torch.int32),
            torch.zeros(m),
            torch.zeros(m),
            torch.zeros(m, cap),
        )
        pos_rows, violations = (torch.full((m, cap), -1, dtype=torch.int32) for _ in range(2))
        keys = (memory.row_labels, memory.stamps, memory.row_ids, labels, ids, own, None)
        flags = (True, GIVEN_SLOT.value)
        table = torch.full((table_size,), 7, dtype=torch.int16)
        positives.label_table_kernel[(1 + 3,)](labels, table, counts, m, parts, table_size, 2, 4 if table_size > 1 else 1)
        if table_size > 1:
            assert (counts == 0).all()
            assert {int(x) for x in table} <= {0, -1, 1, 2, 3} and (table != 0).sum() <= len(labels.unique())
        else:
            counts.zero_()
            assert table.tolist() == [-1 if len(labels.unique()) > 1 else 1]
        positives.count_kernel[(6,)](memory.row_labels, labels, table, counts, m, M, per, parts, table_size, 16)
        out = (pos_counts, lowest, highest, pos_sims, pos_rows, violations)
        v, rows = anchors.detach(), memory.rows
        positives.list_kernel[(m,)](
            v, rows, *keys, table, counts, *out, m, M, per, parts, group, cap, *flags, 17, table_size, 4, block, 8, 16,
            per * group <= block,
        )  # fmt: skip
        S = v @ rows.T
        for i in range(m):
            expected = [
                j for j in range(M)
                if memory.row_labels[j] == labels[i] and memory.stamps[j] >= 0 and memory.row_ids[j] != ids[i] and j != own[i]
            ]  # fmt: skip
            n = min(len(expected), cap)
            assert pos_counts[i] == len(expected)
            assert pos_rows[i, :n].tolist() == expected[:n] and (pos_rows[i, n:] == -1).all()
            assert torch.allclose(pos_sims[i, :n], S[i, expected[:n]]) and (violations[i, :n] == 0).all()
            if expected:
                assert torch.isclose(lowest[i], S[i, expected].min()) and torch.isclose(highest[i], S[i, expected].max())
            else:
                assert lowest[i] == torch.inf and highest[i] == -torch.inf
        assert int(pos_counts.max()) > 5


@pytest.mark.parametrize("name", LONG)
def test_more_positives_than_a_list_holds(name, monkeypatch):
    monkeypatch.setattr(plan, "LIST_BUDGET", 1)
    monkeypatch.setattr(plan, "MIN_LISTED", 6)
    anchors, labels, ids, memory = memory_with(m=4, M=60, D=17, classes=2)
    labels[0] = 5  # few positives beside many
    for reduction in ("sum", "mean", "balanced"):
        anchors.grad = None
        check(LOSSES[name](engine="triton", reduction=reduction), anchors, labels, memory, ids)
