import math

from paper.blocks import Claim, Table, listed, percent, printed, seeds, spread
from paper.study import Spread


def test_a_table_is_markdown():
    assert Table(["a", "b"], [["x", "1"]]).markdown() == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_figures_are_written_one_way():
    assert percent(0.6684) == "66.8" and percent(None) == percent(math.nan) == "–"
    assert printed(77.4) == "77.4" and printed(None) == "–"
    assert spread(Spread({0: 0.5, 1: 0.52})) == "51.0 ± 1.0" and spread(Spread({0: 0.5})) == "50.0"
    assert spread(Spread({0: -0.05}), sign=True) == "−5.0" and spread(Spread({0: 0.05}), sign=True) == "+5.0"
    assert spread(None) == spread(Spread({})) == "–"


def test_words():
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert seeds(1) == "one seed" and seeds(3) == "3 seeds" and Claim("x") == "x"
