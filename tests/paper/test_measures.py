"""What is measured is tested where it is defined and, on real runs, in test_work.py; here are the names and the stops."""

import json

import pytest

from paper import measures
from paper.experiment import base, setting_of
from paper.measures import cost, measure, snapshot, stages
from xbm.errors import InputError
from xbm_app.train.config import override

CONFIG = base(setting_of("cars"))


def test_only_the_lemma_stops_on_the_way():
    assert stages(CONFIG, ("mined", "cost")) == [2000]
    assert stages(CONFIG, ("lemma",)) == [1000, 1900, 1990, 2000]
    assert stages(override(CONFIG, {"optim.iterations": 100}), ("lemma",)) == [90, 100]


def test_a_snapshot_is_named_by_how_long_before_the_end_it_is(tmp_path):
    assert snapshot(tmp_path, 10).name == "before_10.pt"


def test_an_unknown_measure_is_told(tmp_path):
    with pytest.raises(InputError, match="did you mean 'lemma'"):
        measure("lema", CONFIG, tmp_path)


def test_the_plain_queue_is_the_released_codes_and_otherwise_the_same(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(measures, "in_turns", lambda configs, folder: given.update(configs) or {"queue": [0.0123456]})
    config = override(CONFIG, {"memory.update": "moving_average", "memory.reduction": "balanced", "memory.batch_weight": 0.5})
    assert measures.beside_queue(config, tmp_path) == {"queue": [0.01235]} and given["ours"] == config
    plain = given["queue"].memory
    assert (plain.update, plain.ratio, plain.reduction, plain.batch_weight) == ("queue", 1.0, None, 1.0)
    assert given["queue"].loss.reduction == "sum" and given["queue"].optim == config.optim


def test_cost_is_the_difference_of_a_long_run_and_a_short_one(tmp_path, monkeypatch):
    """5 s to warm up and 0.02 s an iteration: the warm-up cancels."""

    def train(config, folder, quiet):
        n = config.optim.iterations
        return {"seconds_per_iteration": (5 + 0.02 * n) / n, "peak_memory_bytes": 7}

    monkeypatch.setattr("xbm_app.train.loop.train", train)
    (tmp_path / "result.json").write_text(json.dumps(train(override(CONFIG, {"optim.iterations": 600}), None, True)))
    found = cost(override(CONFIG, {"optim.iterations": 600}), tmp_path)
    assert found == {"seconds_per_iteration": pytest.approx(0.02), "peak_memory_bytes": 7}
    assert set(measures.MEASURES) == {"lemma", "outliers", "mined", "retrieved", "cost", "beside_queue", "shares"}
