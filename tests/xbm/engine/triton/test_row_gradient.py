"""The gradient in the rows."""

import pytest

from tests.xbm.engine.triton.interpreted import LOSSES, check, memory_with


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_the_rows(name):
    anchors, labels, ids, memory = memory_with(m=9, M=97, D=21, update="backprop")
    check(LOSSES[name](engine="triton", reduction="mean"), anchors, labels, memory, ids)
