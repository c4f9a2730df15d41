from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from paper.experiment import base, config_of, setting_of
from paper.experiments import EXPERIMENTS, drift
from paper.experiments.drift import (
    CROSS_ENTROPY,
    Pooled,
    classify,
    draw_drift,
    draw_lemma,
    drift_arms,
    embedding_of,
    gradient_errors,
    largest_singular_value_squared,
    snapshot,
    stages,
    verdicts,
)
from paper.page import Claim, Figure, Table
from paper.record import Record, Records
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from tests.tiny import tiny_config
from xbm_app.models import build_model
from xbm_app.report.printed_figures import drift_panel, drift_table
from xbm_app.train.config import override

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


def curve(early, late, after):
    """D over 6,000 iterations with a decay at 4,500: the mean until 3,000, until the decay, and after it."""
    return [early if step < 3000 else late if step < 4500 else after for step in LONG]


LONG = [float(t) for t in range(99, 6000, 100)]
SLOW = {"drift_10": curve(0.2, 0.05, 0.01), "drift_100": curve(0.8, 0.2, 0.05), "drift_1000": curve(1.0, 0.4, 0.1)}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, set()),
        ({"drift_10": curve(0.6, 0.05, 0.01)}, {"small"}),
        ({"drift_1000": curve(1.0, 0.6, 0.1)}, {"stable"}),
        ({"drift_100": curve(0.8, 0.2, 0.15)}, {"decay"}),
    ],
)
def test_the_verdict_on_slow_drift_follows_from_the_curves(changes, wrong):
    config = {"optim.decay_at": [4500], "optim.iterations": 6000}
    record = Record({"config": config, "iterations": 6000, "scores": {}, "curves": {"step": LONG, **SLOW, **changes}})
    found = verdicts(record)
    assert {name for name, (right, _) in found.items() if not right} == wrong and len(found) == 3
    if not wrong:
        assert found["stable"][1] == "D(100) 0.8 → 0.2, D(1000) 1 → 0.4" and found["decay"][1].endswith("D(1000) 0.4 → 0.1")


def test_a_run_without_a_late_decay_has_no_verdict():
    assert verdicts(RUN) == {}


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
    figure, table, *claims = draw_drift("cars", [study("drift")])
    assert isinstance(figure, Figure) and [panel["title"] for panel in figure.data["panels"]] == [
        "from scratch, contrastive",
        "from scratch, classification",
        "pretrained, contrastive",
        "pretrained, contrastive, queue",
    ]
    assert isinstance(table, Table) and len(table.rows) == 8 and claims == []  # three points are too few to say more


def test_the_lemma_is_told_pair_by_pair(study):
    """Two anchors with C 0.5 and 4, ε 0.1 and 0.2: bounds 0.05 and 0.8; errors 0.01 and 0.9."""
    figure, table, *claims = draw_lemma("cars", [study("lemma-1")])
    assert table.rows[0][1:] == ["2", "0.15", "0.455", "0.425", "0.66", "50.0 %"]
    assert "within C · ε for 50.0 % of the pairs" in claims[0] and "for 1 of them" in claims[0] and isinstance(claims[0], Claim)
    assert figure.data["panels"][0]["lines"][0]["x"] == [0.05, 0.8] and figure.data["panels"][0]["diagonal"] == [0.01, 0.9]


def test_nothing_run_nothing_drawn():
    assert draw_drift("sop", []) == [] and draw_lemma("sop", []) == []


def config(photos, **more):
    settings = {"loss__name": CROSS_ENTROPY, "memory__ratio": 0.0, "log__every": 10, "optim__iterations": 60, "optim__lr": 3e-3}
    return tiny_config(photos, **{**settings, "optim__decay_at": (50,), "log__checkpoint_every": 20, **more})


def test_it_learns_the_classes_and_watches_the_pooled_features(photos, tmp_path):
    values = classify(config(photos), tmp_path / "run")
    curves = values["curves"]
    assert curves["step"] == [9, 19, 29, 39, 49, 59] and curves["lr"][-1] == pytest.approx(3e-4)
    assert curves["accuracy"][-1] > 0.8 > curves["accuracy"][0] and curves["loss"][-1] < curves["loss"][0]
    assert curves["drift_10"][0] is None and all(value > 0 for value in curves["drift_10"][1:])
    assert curves["drift_10"][-1] < curves["drift_10"][1] and values["data"]["train_classes"] == 6 and values["scores"] == {}


def test_drift_is_that_of_the_models_of_then_and_now(photos, tmp_path):
    """Trained to 20 and to 30 iterations: the distance of their pooled features is what the longer run says of iteration 30."""
    seen = []

    class Kept(Pooled):
        def forward(self, images):
            seen.append(super().forward(images))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "Pooled", Kept)
        curves = classify(config(photos, optim__iterations=30), tmp_path / "run")["curves"]
    wanted = (seen[-1] - seen[-2]).square().sum(1).mean()
    assert curves["drift_10"][-1] == pytest.approx(float(wanted), rel=1e-3)
    assert torch.allclose(seen[-1].norm(dim=1), torch.ones(len(seen[-1])), atol=1e-5)


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(photos, tmp_path, monkeypatch):
    whole = classify(config(photos), tmp_path / "whole")
    calls = 0

    def cross_entropy(*words):
        nonlocal calls
        calls += 1
        if calls == 33:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(*words)

    monkeypatch.setattr(drift, "F", SimpleNamespace(cross_entropy=cross_entropy))
    with pytest.raises(KeyboardInterrupt):
        classify(config(photos), tmp_path / "run")
    monkeypatch.undo()
    assert classify(config(photos), tmp_path / "run") == whole


class Net(nn.Module):
    """A little of everything a trunk has, in float64: a convolution, batch norm, a bend, a head, the unit sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.head(self.body(x).mean((2, 3))))


@pytest.fixture
def scene():
    model = Net().double()
    model(torch.randn(8, 2, 6, 6, dtype=torch.float64))  # statistics worth having
    model.eval()
    image = torch.randn(2, 6, 6, dtype=torch.float64)
    f, weights = embedding_of(model, image)
    parts = jacrev(lambda at: functional_call(model, {**at, **dict(model.named_buffers())}, (image[None],))[0])(weights)
    J = torch.cat([part.reshape(5, -1) for part in parts.values()], dim=1)  # (D, weights)
    return f, weights, J


def test_power_iteration_finds_the_largest_singular_value_of_the_dense_jacobian(scene):
    f, weights, J = scene
    wanted = torch.linalg.svdvals(J)[0].square().item()
    assert largest_singular_value_squared(f, weights, most=500, tolerance=1e-10) == pytest.approx(wanted, rel=1e-6)
    loose = largest_singular_value_squared(f, weights)
    assert loose <= wanted * (1 + 1e-9) and loose == pytest.approx(wanted, rel=1e-2)  # from below


def test_a_few_rounds_stay_below(scene):
    f, weights, J = scene
    one = largest_singular_value_squared(f, weights, most=1)
    assert 0 < one <= torch.linalg.svdvals(J)[0].square().item()


def test_a_gradients_error_is_that_of_the_dense_jacobian(scene):
    f, weights, J = scene
    d = torch.randn(4, 5, dtype=torch.float64)
    assert torch.allclose(gradient_errors(f, weights, d), (d @ J).square().sum(1))


def test_it_is_the_difference_of_the_two_gradients(scene):
    """L = v_i · v_j with v_j constant, once with the embedding of now and once with an old one: the lemma's own words."""
    f, weights, _ = scene
    now, old = torch.randn(2, 5, dtype=torch.float64)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    gradients = [torch.autograd.grad(f(leaves) @ v, list(leaves.values())) for v in (now, old)]
    wanted = sum((a - b).square().sum() for a, b in zip(*gradients))
    assert torch.allclose(gradient_errors(f, weights, (now - old)[None])[0], wanted)


def test_the_bound_holds_for_every_pair(scene):
    f, weights, _ = scene
    d = torch.randn(50, 5, dtype=torch.float64)
    C = largest_singular_value_squared(f, weights, most=500, tolerance=1e-10)
    assert (gradient_errors(f, weights, d) <= C * d.square().sum(1) * (1 + 1e-6)).all()


def test_a_model_of_the_project_goes_through():
    model = build_model("small", dim=8, weights="none", channels=1).eval()
    f, weights = embedding_of(model, torch.randn(1, 16, 16))
    assert largest_singular_value_squared(f, weights, most=3) > 0
    assert gradient_errors(f, weights, torch.randn(2, 8)).shape == (2,)


CARS_CONFIG = base(setting_of("cars"))


def test_only_the_lemma_stops_on_the_way():
    assert stages(CARS_CONFIG, ("mined", "cost")) == [2000]
    assert stages(CARS_CONFIG, ("lemma",)) == [1000, 1900, 1990, 2000]
    assert stages(override(CARS_CONFIG, {"optim.iterations": 100}), ("lemma",)) == [90, 100]


def test_a_snapshot_is_named_by_how_long_before_the_end_it_is(tmp_path):
    assert snapshot(tmp_path, 10).name == "before_10.pt"
