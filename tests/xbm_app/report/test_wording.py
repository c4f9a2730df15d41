import math

import pytest

from xbm_app.report.groups import Stat
from xbm_app.report.scales import label
from xbm_app.report.wording import count, distance, duration, listed, percent, plus_minus, signed, times


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
        (listed(["a", "b", "c"]), "a, b and c"),
        (label(0.30000000000000004), "0.3"),
        (label(-1500), "−1,500"),
        (label(20000), "20k"),
    ],
)
def test_figures_are_written_one_way(written, expected):
    assert written == expected
