"""Work done ahead by threads comes in order, no further ahead than told."""

import time
from functools import partial

import pytest

from xbm.data.ordered import in_order


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_in_order_keeps_the_order_and_raises_in_its_place(workers):
    def call(number):
        time.sleep(0.01 * (number % 3))
        if number == 7:
            raise KeyError("seven")
        return number

    results = in_order((partial(call, number) for number in range(100)), workers, ahead=3)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(KeyError, match="seven"):
        next(results)


def test_in_order_runs_no_further_ahead_than_told():
    started = []
    results = in_order((partial(started.append, number) for number in range(100)), workers=2, ahead=3)
    next(results)
    time.sleep(0.1)
    assert len(started) <= 4
    results.close()
    assert len(started) <= 4
