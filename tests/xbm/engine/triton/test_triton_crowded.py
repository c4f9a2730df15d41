"""Anchors with more positives than a list holds: slower, and the same numbers."""

import pytest

from tests.xbm.engine.triton.interpreted import LONG, LOSSES, check, memory_with
from xbm.engine.triton import plan


@pytest.mark.parametrize("name", LONG)
def test_more_positives_than_a_list_holds(name, monkeypatch):
    monkeypatch.setattr(plan, "LISTED", 1)
    monkeypatch.setattr(plan, "LEAST_LISTED", 6)
    anchors, labels, ids, memory = memory_with(m=4, M=60, D=17, classes=2)
    labels[0] = 5  # few positives beside many
    for reduction in ("sum", "mean", "balanced"):
        anchors.grad = None
        check(LOSSES[name](engine="triton", reduction=reduction), anchors, labels, memory, ids)
