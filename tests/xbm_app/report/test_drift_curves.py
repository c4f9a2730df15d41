import csv

import pytest

from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm_app.report.drift_curves import draw_drift, drift_table, drift_values, read_drift
from xbm_app.train.config import save
from xbm_app.train.metrics import COLUMNS


@pytest.fixture
def run(tmp_path):
    """A run of 100 iterations with a decay at 80, whose drift for Δt = 10 falls from 0.9 to 0.1."""
    folder = tmp_path / "run"
    folder.mkdir()
    save(tiny_config(tmp_path, optim__iterations=100, optim__decay_at=(80,), log__every=10), folder / "config.yaml")
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for k in range(1, 10):
            writer.writerow({"step": 10 * k + 9, "loss": 1, "drift_10": (10 - k) / 10})
    return folder


def test_the_drift_of_a_run_as_a_table_curves_and_a_figure(run, tmp_path):
    record = read_drift(run)
    # first tenth: iterations 19 to 27; before the decay: 70 to 79; after it: from 90 on
    assert drift_table("x", record) == [["x", "10", "0.9", "0.3", "0.1"]]
    curves = drift_values(record)
    assert list(curves) == ["10"] and curves["10"]["step"][0] == 19 and curves["10"]["drift"][0] == 0.9
    assert "<svg" in draw_drift({"x": record}, tmp_path / "drift.svg").read_text()


def test_what_is_no_run_or_too_young_is_told(run, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_drift(tmp_path)
    (run / "metrics.csv").write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(InputError, match="has not measured drift yet"):
        read_drift(run)
    (run / "metrics.csv").unlink()
    with pytest.raises(InputError, match=r"no metrics\.csv"):
        read_drift(run)
