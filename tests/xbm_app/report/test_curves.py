import re

import numpy as np
import pytest

from xbm_app.report.curves import drift, negatives, recall_curves
from xbm_app.report.groups import RunView, Trace, group_runs


def groups(**series):
    step = np.arange(0, 200, 10)
    filled = {name: np.broadcast_to(np.asarray(values, dtype=float), step.shape) for name, values in series.items()}
    return group_runs([RunView("r", "g", "MS", True, 0, trace=Trace(step=step, **filled))])


@pytest.mark.parametrize(
    ("batch", "memory", "told"),
    [
        (4, 200, "4 per step from the batch and 200 from the memory, 50 times as many."),
        (40, 20, "40 per step from the batch and 20 from the memory."),
        (0, 20, "0 per step from the batch and 20 from the memory."),
    ],
)
def test_sources_are_compared_only_where_the_memory_gives_more(batch, memory, told):
    assert told in negatives(groups(valid_negatives_batch=batch, valid_negatives_memory=memory))


def test_drift_is_said_to_come_down_only_where_it_does():
    falling, level = np.linspace(1.0, 0.2, 20), np.full(20, 0.5)
    assert "Δt = 100: down from a peak of 1.00" in drift(groups(drift_100=falling))
    assert "Δt = 100: 0.50 in the last quarter, not much below its peak" in drift(groups(drift_100=level))


@pytest.mark.parametrize("recall", [0.03, 0.7, 1.0])
def test_the_axis_of_recall_ends_at_100_percent(recall):
    runs = [RunView("r", "g", "MS", True, 0, curve=[recall, recall])]
    ticks = re.findall(r'class="tick"[^>]*text-anchor="end">([^<]+)<', str(recall_curves(group_runs(runs))))
    assert ticks[-1] == "100" and all(0 <= float(tick) <= 100 for tick in ticks)


def test_what_was_not_measured_has_no_figure():
    assert negatives(groups(loss=1.0)) is None and drift(groups(drift_10=np.nan)) is None
