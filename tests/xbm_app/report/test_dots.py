import re

from xbm_app.report import RunView
from xbm_app.report.dots import dot_panel
from xbm_app.report.groups import group_runs


def drawn(without, with_memory):
    runs = [RunView("r", "a", "MS", False, seed, recall={"recall@1": v}) for seed, v in without.items()]
    runs += [RunView("r", "b", "MS", True, seed, recall={"recall@1": v}) for seed, v in with_memory.items()]
    return dot_panel("MS", group_runs(runs))


def test_runs_of_one_seed_are_joined_between_the_lanes():
    plot = drawn({0: 0.60, 1: 0.61, 2: 0.62}, {1: 0.66, 2: 0.67, 5: 0.68})
    assert plot.count('class="join"') == 2
    assert plot.count("<circle") == 6 + 2  # two of them in the legend


def test_chance_is_not_blown_up_to_the_width_of_the_plot():
    plot = drawn({0: 0.6000, 1: 0.6001}, {0: 0.6002, 1: 0.6001})
    ticks = [float(t) for t in re.findall(r'class="tick"[^>]*>([\d.]+)<', plot)]
    assert max(ticks) - min(ticks) >= 4
