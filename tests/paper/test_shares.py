import numpy as np
import pytest

from paper.shares import gradient_shares
from tests.tiny import tiny_config
from xbm_app.train.dataset import begin_run, read_run
from xbm_app.train.job import Job
from xbm_app.train.loop import train


@pytest.mark.parametrize("reduction", ["sum", "balanced"])
def test_the_parts_of_a_gradient_by_hand(own_photos, tmp_path, reduction):
    config = tiny_config(
        own_photos, loss__reduction=reduction, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4
    )
    train(config, tmp_path / "run", quiet=True)
    job = Job(config, read_run(config, tmp_path / "run"), tmp_path / "run")
    job.restore()
    job.model.eval()
    truth = np.asarray(job.dataset.train.labels)
    found = gradient_shares(job, truth)
    assert found["false"] == 0.0  # all labels are right
    indices = job.sampler.batch(job.batches_per_step * 4)
    anchors = job.model(job.feed.test(indices)).detach()
    rows, ids, labels = job.memory.embeddings, job.memory.ids.numpy(), truth[indices]
    positives = [np.flatnonzero((truth[ids] == label) & (ids != i)) for i, label in zip(indices, labels)]
    pulls = [rows[list(each)].sum(0).norm().item() for each in positives]
    assert found["memory"]["pull"] == pytest.approx(np.mean(pulls), rel=1e-3)
    assert found["memory"]["pull_weight"] == pytest.approx(np.mean([len(each) for each in positives]), rel=1e-3)
    near = (anchors @ rows.T).numpy() > -0.9
    negatives = [((truth[ids] != label) & near[k]).sum() for k, label in enumerate(labels)]
    pushes = [min(n, max(len(p), 1)) if reduction == "balanced" else n for n, p in zip(negatives, positives)]
    assert found["memory"]["push_weight"] == pytest.approx(np.mean(pushes), rel=1e-3)
    assert found["age"]["rows"] == job.memory.ages.median()


def test_pushes_at_images_of_the_anchors_own_class_are_false(own_photos, tmp_path):
    config = tiny_config(own_photos, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4)
    train(config, tmp_path / "run", quiet=True)
    job = Job(config, begin_run(config, tmp_path / "run"), tmp_path / "run")
    job.restore()
    job.model.eval()
    assert gradient_shares(job, np.zeros(len(job.dataset.train), np.int64))["false"] == 1.0
