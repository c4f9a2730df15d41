"""The gradient in the rows."""

import pytest

from tests.xbm.engine.triton.interpreted import EVERY, LOSSES, check, memory_with


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_of_the_rows(name):
    anchors, labels, ids, memory = memory_with(m=9, M=97, D=21, update="backprop")
    check(LOSSES[name](engine="triton", reduction="mean"), anchors, labels, memory, ids)
