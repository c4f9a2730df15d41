import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from paper.experiment import setting_of
from paper.experiments import BEYOND
from paper.experiments.robustness_cause import PUSHES, PushedContrastiveLoss, cause_arms, draw_cause, gradient_shares, ratio
from paper.page import Claim, Figure, Table
from paper.record import Record, Records
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from tests.tiny import tiny_config
from xbm import ContrastiveLoss, CrossBatchMemory
from xbm.losses import LOSSES
from xbm_app.train.dataset import begin_run, read_run
from xbm_app.train.loop import train
from xbm_app.train.state import RunState

GLYPHS = setting_of("glyphs")


def test_the_ratio_of_the_two_sides_where_both_are_known():
    curves = {
        "step": [0, 1, 2, 3], "valid_negatives_memory": [None, 30.0, 40.0, 0.0],
        "valid_positives_memory": [None, 10.0, 0.0, 5.0],
    }  # fmt: skip
    assert ratio(Record({"config": {}, "curves": curves})) == ([1], [3.0])


def test_one_thing_is_changed_at_a_time():
    arms = {arm.label: dict(arm.settings) for arm in cause_arms(GLYPHS)}
    younger, summed = arms["summed, rows 8 times younger"], arms["summed"]
    assert younger.pop("memory.updates_per_step") == 8 and younger == summed
    assert len(arms) == 4 + len(PUSHES) and len(cause_arms(CARS)) == 3  # a pretrained trunk does not collapse


def test_the_cause_is_drawn_and_told(tmp_path):
    records = Records(tmp_path)
    carry_out([BEYOND["robustness-cause"]], [GLYPHS], 1, records)
    figure, table, claim, _, parts, _ = draw_cause("glyphs", [Study(BEYOND["robustness-cause"], GLYPHS, records)])
    assert isinstance(figure, Figure) and isinstance(table, Table) and isinstance(claim, Claim)
    assert parts.rows[1] == ["summed", "2.5", "0.5", "8", "30", "60", "55"]
    sides, *_, swept = figure.data["panels"]
    assert sides["lines"][0]["y"] == [20.0, 15.0, 10.0] and swept["lines"][0]["x"] == sorted([1.0, *PUSHES])
    assert table.rows[1][0] == "summed" and table.rows[1][2] == "10" and "weigh 10 times as much as positives" in claim


def test_nothing_is_drawn_before_its_runs_are_there(tmp_path):
    assert draw_cause("glyphs", [Study(BEYOND["robustness-cause"], GLYPHS, Records(tmp_path))]) == []


@pytest.mark.parametrize("setting", [GLYPHS, CARS])
def test_the_cause_is_looked_for_on_held_out_classes(setting):
    assert all(arm.settings["data.holdout"] > 0 and arm.choose is None for arm in cause_arms(setting))


def scene():
    torch.manual_seed(3)
    anchors = normalize(torch.randn(7, 4, dtype=torch.float64) + 1.0).requires_grad_()
    memory = CrossBatchMemory(53, 4, dtype=torch.float64)
    memory.enqueue(normalize(torch.randn(53, 4, dtype=torch.float64) + 1.0), torch.arange(53) % 5, torch.arange(53))
    return anchors, torch.arange(7) % 5, memory, torch.arange(100, 107)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_at_one_it_is_the_balanced_loss_and_without_bound_the_sum(engine):
    for push, same in ((1.0, "balanced"), (1e9, "sum")):
        results = []
        for loss in (
            PushedContrastiveLoss(push=push, reduction="balanced", engine=engine),
            ContrastiveLoss(reduction=same, engine=engine),
        ):
            anchors, labels, memory, ids = scene()
            value = loss(anchors, labels, memory, ids=ids)
            value.backward()
            results.append((value.item(), anchors.grad))
        (one, gradient), (other, expected) = results
        assert one == pytest.approx(other, rel=1e-12)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_the_other_reductions_are_the_librarys(engine):
    anchors, labels, memory, ids = scene()
    for reduction in ("sum", "mean"):
        ours, library = (
            loss(reduction=reduction, engine=engine)(anchors, labels, memory, ids=ids).item()
            for loss in (PushedContrastiveLoss, ContrastiveLoss)
        )
        assert ours == library


@pytest.mark.parametrize("push", [0.5, 1.5])
def test_both_engines_bound_the_push_alike(push):
    outcomes = []
    for engine in ("reference", "streaming"):
        anchors, labels, memory, ids = scene()
        loss = PushedContrastiveLoss(push=push, reduction="balanced", engine=engine)(anchors, labels, memory, ids=ids)
        loss.backward()
        outcomes.append((loss.detach(), anchors.grad))
    torch.testing.assert_close(*outcomes)


def test_configs_can_name_it():
    assert LOSSES["contrastive_pushed"] is PushedContrastiveLoss and LOSSES["contrastive"] is ContrastiveLoss


def test_negatives_weigh_at_most_rho_times_the_positives():
    S = torch.tensor([[0.9, 0.8, 0.9, 0.8, 0.7, 0.6]], dtype=torch.float64)
    positive = torch.tensor([[True, True, False, False, False, False]])
    weights = PushedContrastiveLoss(push=1.5, reduction="balanced").weights(S, positive, ~positive)
    assert weights.tolist()[0] == pytest.approx([1, 1, 0.75, 0.75, 0.75, 0.75])


@pytest.mark.parametrize("reduction", ["sum", "balanced"])
def test_the_parts_of_a_gradient_by_hand(own_photos, tmp_path, reduction):
    config = tiny_config(
        own_photos, loss__reduction=reduction, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4
    )
    train(config, tmp_path / "run", quiet=True)
    run = RunState(config, read_run(config, tmp_path / "run"), tmp_path / "run")
    run.restore()
    run.model.eval()
    truth = np.asarray(run.dataset.train.labels)
    shares = gradient_shares(run, truth)
    assert shares["false"] == 0.0  # all labels are right
    indices = run.data.sampler.batch(run.data.batches_per_step * 4)
    anchors = run.model(run.data.feed.test(indices)).detach()
    rows, ids, labels = run.memory.embeddings, run.memory.ids.numpy(), truth[indices]
    positives = [np.flatnonzero((truth[ids] == label) & (ids != i)) for i, label in zip(indices, labels)]
    pulls = [rows[list(each)].sum(0).norm().item() for each in positives]
    assert shares["memory"]["pull"] == pytest.approx(np.mean(pulls), rel=1e-3)
    assert shares["memory"]["pull_weight"] == pytest.approx(np.mean([len(each) for each in positives]), rel=1e-3)
    near = (anchors @ rows.T).numpy() > -0.9
    negatives = [((truth[ids] != label) & near[k]).sum() for k, label in enumerate(labels)]
    pushes = [min(n, max(len(p), 1)) if reduction == "balanced" else n for n, p in zip(negatives, positives)]
    assert shares["memory"]["push_weight"] == pytest.approx(np.mean(pushes), rel=1e-3)
    assert shares["age"]["rows"] == run.memory.ages.median()


def test_pushes_at_images_of_the_anchors_own_class_are_false(own_photos, tmp_path):
    config = tiny_config(own_photos, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4)
    train(config, tmp_path / "run", quiet=True)
    run = RunState(config, begin_run(config, tmp_path / "run"), tmp_path / "run")
    run.restore()
    run.model.eval()
    assert gradient_shares(run, np.zeros(len(run.dataset.train), np.int64))["false"] == 1.0
