import json
import re
from html import unescape

import numpy as np

from xbm_app.report.charts import BOTTOM, LEFT, RIGHT, TOP, Axes, Line, panel, svg, unbroken
from xbm_app.report.scales import counts, linear, ranks

NAN = float("nan")


def axes(y, x=None, start=False):
    return Axes(
        x or linear([0, 40], snug=True),
        y,
        "step",
        "loss",
        read_x=lambda v: f"step {v:.0f}",
        read_y=lambda v: f"{v:.1f}",
        start=start,
    )


def line(y, x=None, **more):
    y = np.array(y, dtype=float)
    return Line("a", "with", np.arange(len(y)) * 10.0 if x is None else np.array(x, dtype=float), y, **more)


def paths(text):
    return [
        [tuple(map(float, p.split())) for p in d.lstrip("M").split("L")]
        for d in re.findall(r'class="line dash-\d" d="([^"Z]*)"', text)
    ]


def test_a_line_runs_from_corner_to_corner_of_its_axes():
    assert paths(svg([line([0, 1, 2, 3, 4])], axes(linear([0, 4])), ""))[0] == [
        (LEFT + (RIGHT - LEFT) * i / 4, BOTTOM + (TOP - BOTTOM) * i / 4) for i in range(5)
    ]


def test_a_gap_breaks_the_line_and_a_point_between_gaps_is_a_dot():
    drawn = svg([line([1, 2, NAN, 3, NAN])], axes(linear([0, 4])), "")
    assert [len(p) for p in paths(drawn)] == [2]
    assert re.findall(r'<circle class="dot" cx="([\d.]+)"', drawn) == [f"{LEFT + (RIGHT - LEFT) * 3 / 4:.1f}"]
    assert "nan" not in drawn


def test_stretches_end_at_every_value_that_is_not_finite():
    assert unbroken(np.array([NAN, 1, 2, NAN, NAN, 3, np.inf])) == [[1, 2], [5]]
    assert unbroken(np.array([])) == []


def test_a_chart_of_a_single_point_is_a_dot_on_finite_axes():
    one = line([0.3], x=[250])
    drawn = svg([one], Axes(linear([250]), linear([0.3]), "", "", str, str), "")
    assert drawn.count("<circle") == 1 and "nan" not in drawn and "inf" not in drawn


def test_zeros_on_a_counting_axis_lie_on_its_base():
    drawn = paths(svg([line([0, 10, 100])], axes(counts([100])), ""))[0]
    assert [y for _, y in drawn] == [BOTTOM, round(BOTTOM + (TOP - BOTTOM) * 2 / 3, 1), TOP]


def test_a_band_encloses_its_line_and_stops_at_gaps():
    y = np.array([1.0, 2.0, NAN, 2.0, 2.0])
    drawn = svg([line(y, low=y - 1, high=y + 1)], axes(linear([0, 4])), "")
    assert len(re.findall('class="band"', drawn)) == 2


def test_the_legend_holds_the_last_value_or_the_first():
    y = [5, 6, 7, NAN]
    assert "<b>7.0</b>" in panel("t", [line(y)], axes(linear(y)), "") and "step 20" in panel(
        "t", [line(y)], axes(linear(y)), ""
    )
    curve = line([50, 60, 70], x=[1, 2, 3])
    assert "<b>50.0</b>" in panel("t", [curve], axes(linear([50, 70]), ranks(3), start=True), "")


def test_a_line_without_any_value_is_left_out():
    drawn = panel("t", [line([NAN, NAN]), line([1, 2])], axes(linear([1, 2])), "")
    assert drawn.count("<li ") == 1
    assert "nothing measured" in panel("t", [line([NAN])], axes(linear([])), "")


def test_the_read_out_knows_every_finite_point():
    drawn = svg([line([1, NAN, 3])], axes(linear([0, 4])), "")
    readings = json.loads(unescape(re.search(r'data-lines="([^"]*)"', drawn)[1]))
    assert [point[1:] for point in readings[0]] == [["step 0", "1.0"], ["step 20", "3.0"]]
    assert readings[0][0][0] == LEFT


def test_further_lines_of_a_colour_differ_by_their_dashes():
    drawn = svg([line([1, 2]), line([2, 1], dash=1)], axes(linear([1, 2])), "")
    assert "line dash-0" in drawn and "line dash-1" in drawn
