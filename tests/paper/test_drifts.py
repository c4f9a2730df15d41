import pytest

from paper.blocks import Claim, Figure, Table
from paper.drifts import draw_drift, draw_lemma, drift_arms
from paper.experiment import config_of, setting_of
from paper.record import Record, Records
from paper.registry import EXPERIMENTS
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from xbm_app.report.drift_curves import drift_panel, drift_table

STEPS = [float(t) for t in range(99, 1000, 100)]
RUN = Record({
    "config": {"optim.decay_at": [800], "optim.iterations": 1000}, "iterations": 1000,
    "curves": {"step": STEPS, "drift_10": [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "drift_100": [None] + [0.5] * 9},
})  # fmt: skip


def test_the_phases_of_a_run():
    ten, hundred = drift_table("x", RUN.curves)
    # first tenth: iterations 99 to 189; before the decay: 700 to 800; after: from 810 on, and from 900 on for Δt = 100
    assert ten == ["x", "10", "1", "0.3", "0.15"] and hundred == ["x", "100", "0.5", "0.5", "0.5"]


def test_the_panel_has_a_line_a_step_and_marks_the_decay():
    panel = drift_panel("x", RUN.curves)
    assert [line["label"] for line in panel["lines"]] == ["Δt = 10", "Δt = 100"] and panel["marks"] == [800]
    assert panel["lines"][1]["x"] == STEPS[1:]


def test_from_scratch_is_long_enough_and_crosses_a_decay():
    for data in ("cars", "omniglot"):
        setting = setting_of(data, "resnet50")
        scratch, classified = (config_of(setting, arm.settings) for arm in drift_arms(setting)[:2])
        assert scratch.model.weights == "none" and scratch.optim.iterations >= 4000
        assert 3000 < scratch.optim.decay_at[0] < scratch.optim.iterations and scratch.memory.ratio == 0
        assert classified.loss.name == "cross_entropy" and classified.optim == scratch.optim
    assert len(drift_arms(setting_of("cars"))) == 4 and len(drift_arms(setting_of("omniglot"))) == 2


@pytest.fixture
def study(tmp_path):
    records = Records(tmp_path)

    def make(name):
        carry_out([EXPERIMENTS[name]], [CARS], 2, records)
        return Study(EXPERIMENTS[name], CARS, records)

    return make


def test_drift_is_drawn_for_scratch_pretrained_and_classification(study):
    figure, table, *said = draw_drift("cars", [study("drift")])
    assert isinstance(figure, Figure) and [panel["title"] for panel in figure.data["panels"]] == [
        "from scratch, contrastive",
        "from scratch, classification",
        "pretrained, contrastive",
        "pretrained, contrastive, queue",
    ]
    assert isinstance(table, Table) and len(table.rows) == 8 and said == []  # three points are too few to say more


def test_the_lemma_is_told_pair_by_pair(study):
    """Two anchors with C 0.5 and 4, ε 0.1 and 0.2: bounds 0.05 and 0.8; errors 0.01 and 0.9."""
    figure, table, *said = draw_lemma("cars", [study("lemma-1")])
    assert table.rows[0][1:] == ["2", "0.15", "0.455", "0.425", "0.66", "50.0 %"]
    assert "within C · ε for 50.0 % of the pairs" in said[0] and "for 1 of them" in said[0] and isinstance(said[0], Claim)
    assert figure.data["panels"][0]["lines"][0]["x"] == [0.05, 0.8] and figure.data["panels"][0]["diagonal"] == [0.01, 0.9]


def test_nothing_run_nothing_drawn():
    assert draw_drift("sop", []) == [] and draw_lemma("sop", []) == []
