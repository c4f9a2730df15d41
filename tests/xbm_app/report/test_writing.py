import math

import pytest

from xbm_app.report.groups import Stat
from xbm_app.report.writing import (
    change,
    count,
    distance,
    duration,
    listed,
    loss_name,
    percent,
    plus_minus,
    seeds,
    signed,
    times,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.66849), "66.8"),
        (percent(math.nan), "–"),
        (signed(0.056), "+5.6"),
        (signed(-0.003), "−0.3"),
        (signed(-0.0001), "0.0"),
        (signed(0.1003), "+10.0"),
        (plus_minus(Stat(0.668, 0.0042, 3)), "66.8 ± 0.4"),
        (plus_minus(Stat(0.668, 0.0002, 3)), "66.8 ± 0.02"),
        (plus_minus(Stat(0.668, math.nan, 1)), "66.8"),
        (count(3758.4), "3,758"),
        (count(1.94), "1.9"),
        (count(0.125), "0.12"),
        (count(0), "0"),
        (times(310.4), "310 times"),
        (times(1.44), "1.4 times"),
        (duration(0.0413), "41.3 ms"),
        (duration(0.00002), "0.02 ms"),
        (duration(61), "61.0 s"),
        (duration(5400), "1 h 30 min"),
        (duration(math.nan), "–"),
        (distance(0.0213), "0.021"),
        (distance(1.234), "1.23"),
        (change(2.0, 2.5), "+25\u00a0%"),
        (change(2.0, 1.0), "−50\u00a0%"),
        (seeds(1), "one seed"),
        (seeds(3), "3 seeds"),
        (loss_name("multi_similarity"), "multi similarity"),
        (loss_name("ms"), "MS"),
        (listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_figures_are_written_one_way(written, expected):
    assert written == expected
