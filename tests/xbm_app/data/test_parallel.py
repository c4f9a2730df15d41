"""Work done ahead by threads comes in order, no further ahead than told."""

import subprocess
import sys
import time
from functools import partial

import pytest

from xbm_app.data.parallel import in_order


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


def test_ctrl_c_ends_the_loop_wherever_it_comes():
    """At every line that this thread goes through once the threads run, in whatever file."""
    code = """
import sys, time
from functools import partial
from xbm_app.data.parallel import in_order

def call(number):
    time.sleep(0.001)
    return number

def interrupted_at(place):
    passed = 0
    def trace(frame, event, argument):
        nonlocal passed
        passed += 1
        if passed == place:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    results = in_order((partial(call, number) for number in range(5)), workers=2, ahead=2)
    next(results)
    results.gi_frame.f_trace = trace
    sys.settrace(trace)
    try:
        for _ in results:
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

place = 1
while interrupted_at(place):
    place += 1
print(place)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40  # places
