import json
import math
import re
from html import unescape

import numpy as np
import pytest

from xbm_app.report.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axes,
    Line,
    counts,
    dot_panel,
    linear,
    panel,
    ranks,
    svg,
    tick_label,
    unbroken,
)  # fmt: skip
from xbm_app.report.groups import RunView, group_runs

NAN = float("nan")


# ------------------------------------------------------------------ axes


def test_linear_axis_ends_at_round_values_that_enclose_the_data():
    scale = linear([61.3, 68.9])
    assert (scale.low, scale.high) == (60, 70)
    assert scale.ticks == (60, 62, 64, 66, 68, 70)


def test_snug_axis_ends_at_the_data_and_ticks_inside():
    scale = linear([10, 1495], zero=True, snug=True)
    assert (scale.low, scale.high) == (0, 1495)
    assert scale.ticks == (0, 500, 1000)


def test_values_keep_their_proportions_on_the_axis():
    placed = linear([0, 10]).place(np.array([0, 2.5, 10]), 200, 100)
    assert placed.tolist() == [200, 175, 100]


@pytest.mark.parametrize("values", [[7.0], [0.0], [-3.0, -3.0], [1e-9, 1e-9], []])
@pytest.mark.parametrize("zero", [False, True])
def test_an_axis_of_one_value_or_none_still_has_an_extent(values, zero):
    scale = linear(values, zero=zero)
    assert scale.low < scale.high and len(scale.ticks) >= 2
    assert all(scale.low <= v <= scale.high for v in values)
    assert np.isfinite(scale.place(np.array(values or [0.5]), 0, 1)).all()


def test_values_that_are_not_finite_do_not_stretch_an_axis():
    assert linear([math.nan, 1, math.inf, 2]).high == 2


def test_tick_labels_carry_no_rounding_noise():
    assert linear([0, 0.7]).ticks == (0, 0.2, 0.4, 0.6, 0.8)


def test_ranks_are_spaced_by_doubling():
    scale = ranks(32)
    gaps = np.diff(scale.place(np.array([1, 2, 4, 8, 16, 32]), 0, 100))
    assert scale.ticks == (1, 2, 4, 8, 16, 32)
    assert gaps == pytest.approx(np.full(5, 20))
    assert ranks(1000).ticks == (1, 10, 100, 1000)
    assert ranks(1).high > 1


def test_counts_axis_has_a_zero_below_its_decades():
    scale = counts([0, 3758, math.nan])
    assert scale.ticks == (0, 1, 10, 100, 1000, 10000)
    placed = scale.place(np.array(scale.ticks), 0, 5)
    assert placed == pytest.approx([0, 1, 2, 3, 4, 5])
    assert scale.place(np.array([0.5]), 0, 5) == pytest.approx([0.5])


def test_counts_that_are_all_zero_still_have_an_axis():
    assert counts([0, 0]).ticks == (0, 1, 10)


@pytest.mark.parametrize(("value", "text"), [(0.30000000000000004, "0.3"), (-1500, "−1,500"), (20000, "20k")])
def test_ticks_are_written_one_way(value, text):
    assert tick_label(value) == text


# ------------------------------------------------------------------ line charts


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


# ------------------------------------------------------------------ R@1 per seed


def dots(without, with_memory):
    runs = [RunView("r", "a", "MS", False, seed, recall={"recall@1": v}) for seed, v in without.items()]
    runs += [RunView("r", "b", "MS", True, seed, recall={"recall@1": v}) for seed, v in with_memory.items()]
    return dot_panel("MS", group_runs(runs))


def test_runs_of_one_seed_are_joined_between_the_lanes():
    plot = dots({0: 0.60, 1: 0.61, 2: 0.62}, {1: 0.66, 2: 0.67, 5: 0.68})
    assert plot.count('class="join"') == 2
    assert plot.count("<circle") == 6 + 2  # two of them in the legend


def test_chance_is_not_blown_up_to_the_width_of_the_plot():
    plot = dots({0: 0.6000, 1: 0.6001}, {0: 0.6002, 1: 0.6001})
    ticks = [float(t) for t in re.findall(r'class="tick"[^>]*>([\d.]+)<', plot)]
    assert max(ticks) - min(ticks) >= 4
