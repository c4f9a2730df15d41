"""Training from Python: the same run as from the command line, callbacks, a transform that resumes exactly."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import xbm
from tests.tiny import SETTINGS, differences, draw_photos, set_options
from tests.tiny import xbm as command
from xbm.errors import InputError
from xbm_app.train.config import Config, load, override, save

TRANSFORM = v2.Compose([v2.RandomRotation(20), v2.RandomApply([v2.GaussianBlur(3)], p=0.5)])


def train(photos, out, changes=None, **options):
    return xbm.train(photos, out=out, trunk="small", set={**SETTINGS, **(changes or {})}, quiet=True, **options)


@pytest.fixture(scope="module")
def run(own_photos, tmp_path_factory):
    torch.set_num_threads(1)
    return train(str(own_photos), tmp_path_factory.mktemp("python") / "run")


def test_the_run_is_that_of_the_command_line(run, own_photos, tmp_path):
    words = ["train", "--data", own_photos, "--trunk", "small", "--out", tmp_path / "run", "--quiet", *set_options()]
    assert command(*words).code == 0
    assert load(tmp_path / "run" / "config.yaml") == run.config and differences(run.folder, tmp_path / "run") == []


def test_a_run_has_scores_a_model_a_report_and_a_text(run, own_photos, tmp_path):
    assert run.scores == run.result["protocols"]["test"] and 0 <= run.scores["recall@1"] <= 1
    image = next(own_photos.rglob("*.png"))
    assert run.model.embed([image]).shape == (1, 12) and run.model is run.model
    page = run.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html" and page.stat().st_size > 10_000
    assert run.report() == run.folder / "report.html"
    lines = repr(run).splitlines()
    assert lines[0] == f"TrainedRun {run.folder}"
    assert lines[1] == "  photos: 36 training images of 6 classes, 36 test queries"
    assert lines[2] == "  small, contrastive, memory queue, 17 iterations"
    assert lines[3].startswith(f"  R@1 {100 * run.scores['recall@1']:.1f}, R@2 ") and lines[3].endswith("(percent)")


def test_callbacks_get_the_rows_and_the_scores_on_held_out_classes(own_photos, tmp_path):
    rows, scores = [], []
    changes = {"data.holdout": 0.4, "log.evaluate_every": 10, "batch.size": 6, "optim.iterations": 11}
    train(own_photos, tmp_path / "run", changes, on_log=rows.append, on_evaluate=lambda done, each: scores.append((done, each)))
    assert [row["step"] for row in rows] == [4, 9, 10]
    assert all(np.isfinite(value) for row in rows for value in row.values())
    ((done, held_out),) = scores
    assert done == 10 and held_out["recall@1"] == rows[1]["recall@1"] and "r_precision" in held_out


def test_a_run_with_a_transform_resumes_exactly(own_photos, tmp_path):
    whole = train(own_photos, tmp_path / "whole", transform=TRANSFORM)
    half = train(own_photos, tmp_path / "half", {"optim.iterations": 10}, transform=TRANSFORM)
    assert half.config.data.transform == whole.config.data.transform and "RandomRotation" in half.config.data.transform
    save(whole.config, half.folder / "config.yaml")  # as if it had been stopped there
    other = v2.RandomInvert()
    for wrong, message in ((None, "pass it from Python"), (other, r"the transform passed is RandomInvert\(p=0.5\)")):
        with pytest.raises(InputError, match=message):
            xbm.train(resume=half.folder, transform=wrong, quiet=True)
    assert command("train", "--resume", half.folder).code == 2
    xbm.train(resume=half.folder, transform=TRANSFORM, quiet=True)
    assert differences(whole.folder, half.folder) == []


def test_a_transform_changes_what_is_learned_and_only_that(run, own_photos, tmp_path):
    other = train(own_photos, tmp_path / "run", transform=TRANSFORM)
    assert differences(run.folder, other.folder)
    assert override(other.config, {"data.transform": None}) == run.config


def test_a_batch_has_no_more_classes_than_there_are(tmp_path, capsys):
    photos = draw_photos(tmp_path / "photos", classes=6, each=3)
    run = xbm.train(photos, out=tmp_path / "run", trunk="small", set={"optim.iterations": 1, "log.trackers": ""})
    assert run.config.batch.size == 12
    assert "there are 3 classes to train on: training with batches of 12 images" in capsys.readouterr().err
    with pytest.raises(InputError, match="a batch needs 4 different classes but there are 3"):
        xbm.train(photos, out=tmp_path / "other", trunk="small", set={"batch.size": 16})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set": {"optim.iteratoins": 3}}, "optim.iteratoins.*did you mean 'optim.iterations'"),
        ({"set": {"recipe": "paper"}}, "pass recipe as an option of its own"),
        ({"set": {"memory.ratio": 1}, "memory": False}, "omit one of the two"),
        ({"config": Config(), "loss": "ms"}, "omit the preset"),
        ({"preset": "cars"}, "takes no preset"),
        ({"resume": "run"}, "omit all other options"),
        ({"set": {"model.freeze": "trunk"}, "trunk": "small", "transform": TRANSFORM}, "a frozen trunk sees every image once"),
    ],
)
def test_what_does_not_fit_together_is_refused(own_photos, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        xbm.train(own_photos, out=tmp_path / "run" if "resume" not in options else None, quiet=True, **options)
    assert not (tmp_path / "run" / "config.yaml").exists()
