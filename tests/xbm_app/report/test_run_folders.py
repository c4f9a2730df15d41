"""From run folders to what the page shows: the right figures, the right pictures, and no pictures where they are gone."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

from tests.tiny import draw_photos, tiny_config
from xbm.errors import InputError
from xbm_app.files import write_bytes
from xbm_app.report import run_folders as module
from xbm_app.report.printed_figures import draw_drift, drift_table, drift_values
from xbm_app.report.run_folders import read_drift, read_result, report_runs
from xbm_app.train.config import save, to_dict
from xbm_app.train.dataset import read_run
from xbm_app.train.load import load
from xbm_app.train.loop import train
from xbm_app.train.metrics import COLUMNS, read_metrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Photographs, and runs on them: without memory, with memory and two seeds."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("report")
    photos = draw_photos(home / "photos")
    train(tiny_config(photos, memory__ratio=0.0), home / "base", quiet=True)
    train(tiny_config(photos, seed=1), home / "second", quiet=True)
    train(tiny_config(photos), home / "first", quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xbm_app.train.label_errors.MOST", 1.0)
        doubting = {"memory__update": "moving_average", "memory__doubt": "skip", "data__noise": 0.3}
        train(tiny_config(photos, **doubting), home / "doubting", quiet=True)
    return home


@pytest.fixture
def views(monkeypatch, folders):
    """The views that a page would be made of."""

    def make(*names, groups=None, home=folders):
        shown = {}

        def write(views, out, title):
            shown.update(views=views, title=title)
            return out

        monkeypatch.setattr(module, "write_report", write)
        report_runs([home / name for name in names], home / "page.html", groups)
        make.title = shown["title"]
        return shown["views"]

    return make


def pixels(picture):
    return np.asarray(picture)


def test_figures_and_settings_of_a_run(views, folders):
    (view,) = views("first")
    result = read_result(folders / "first")
    assert view.data == "photos, test classes never seen in training"
    assert view.name == "first" and view.seed == 0 and view.memory and view.loss == "contrastive" and view.reduction == "sum"
    assert view.recall == {
        name: v for name, v in result.items() if name.startswith("recall@") or name in ("map@r", "r_precision")
    }
    assert list(view.curve) == result["curve"] and view.iterations == 17
    assert view.seconds == pytest.approx(17 * result["seconds_per_iteration"])
    assert view.config["trunk"] == "small, 12-d" and view.config["memory"] == "memory R_M 1, queue"
    assert view.command == "xbm train --config first/config.yaml" and view.versions["torch"] == torch.__version__
    assert views("base")[0].config["memory"] == "no memory" and not views("base")[0].memory


def test_the_page_is_titled_with_the_name_of_the_data(views):
    for names, title in (
        (["first"], "photos: one run"), (["first", "second"], "photos: 2 runs"),
        (["base", "first"], "What the memory does: photos"),
    ):  # fmt: skip
        views(*names)
        assert views.title == title


def test_classes_that_also_occur_in_training_are_not_called_unseen(views, folders, tmp_path):
    shutil.copytree(folders / "first", tmp_path / "first")
    result = read_result(folders / "first")
    result["data"]["shared_classes"] = 4
    write_bytes(tmp_path / "first" / "result.json", json.dumps(result).encode(), checksum=True)
    (view,) = views("first", home=tmp_path)
    assert view.data == "photos, test images, 4 of whose classes also occur in training"


def test_the_trace_is_the_metrics(views, folders):
    (view,) = views("first")
    rows = read_metrics(folders / "first" / "metrics.csv")
    assert view.trace.step.tolist() == [4, 9, 14, 16] and view.trace.evaluations == []
    assert view.trace.loss.tolist() == [row["loss"] for row in rows]
    np.testing.assert_array_equal(view.trace.valid_negatives_memory, [row["valid_negatives_memory"] for row in rows])


def test_the_pictures_are_the_queries_and_what_the_model_retrieves(views, folders):
    (view,) = views("first")
    images = read_run(load(folders / "first").config, folders / "first").protocols[0].query
    vectors = load(folders / "first").embed_set(images)
    similarity = (vectors @ vectors.T).fill_diagonal_(-2)
    assert 0 < len(view.queries) <= 24 and len({query.key for query in view.queries}) == len(view.queries)
    place = {pixels(images.open(k)).tobytes(): k for k in range(len(images))}
    for query in view.queries:
        index = images.paths.index(query.key)
        assert place[pixels(query.picture).tobytes()] == index
        found = [place[pixels(match.picture).tobytes()] for match in query.results]
        assert [match.correct for match in query.results] == (images.labels[found] == images.labels[index]).tolist()
        shown = [match.similarity for match in query.results]
        np.testing.assert_allclose(shown, similarity[index, found], atol=1e-5)
        np.testing.assert_allclose(shown, similarity[index].topk(8).values, atol=1e-5)


def test_mined_negatives_show_training_images_of_other_classes(views, folders):
    (view,) = views("first")
    train_set = read_run(load(folders / "first").config, folders / "first").train
    labels = {pixels(train_set.open(k)).tobytes(): int(train_set.labels[k]) for k in range(len(train_set))}
    assert len(view.mined) == 8
    for mined in view.mined:
        label = labels[pixels(mined.anchor).tobytes()]
        assert labels[pixels(mined.positive).tobytes()] == label and mined.memory
        assert all(labels[pixels(match.picture).tobytes()] != label for match in [*mined.batch, *mined.memory])
    assert views("base")[0].mined == []


def test_labels_in_doubt_show_the_image_its_class_and_the_one_it_lies_among(views, folders):
    (view,) = views("doubting")
    train_set = read_run(load(folders / "doubting").config, folders / "doubting").train  # with the labels it was trained on
    labels = {pixels(train_set.open(k)).tobytes(): int(train_set.labels[k]) for k in range(len(train_set))}
    with (folders / "doubting" / "doubted.csv").open() as file:
        listed = [(row["filepath"], row["given_label"], row["predicted_label"]) for row in csv.DictReader(file)]
    assert [(each.key, each.label, each.nearest) for each in view.doubtful] == listed[:12] and listed
    for each in view.doubtful:
        assert each.key == train_set.describe([*labels].index(pixels(each.picture).tobytes()))
        for name, found in ((each.label, each.own), (each.nearest, each.other)):
            assert {str(train_set.class_names[labels[pixels(match.picture).tobytes()]]) for match in found} <= {name}
    assert any(each.own for each in view.doubtful) and any(each.other for each in view.doubtful)
    assert views("first")[0].doubtful == []


def test_runs_show_the_same_queries_one_run_a_group_has_pictures(views):
    base, second, first = views("base", "second", "first")
    assert base.group == "contrastive, sum, no memory"
    assert first.group == second.group == "contrastive, sum, memory R_M 1, queue"
    assert [query.key for query in base.queries] == [query.key for query in first.queries] and len(base.queries) > 0
    assert list(second.queries) == [] and list(second.mined) == []  # the group's lowest seed stands for it
    named = views("base", "first", groups=["a", "b"])
    assert [view.group for view in named] == ["a", "b"]


def test_queries_are_those_that_some_run_gets_wrong(views):
    base, first = views("base", "first")
    assert base.queries and base.chosen == first.chosen and "wrong in at least one" in base.chosen
    for one, other in zip(base.queries, first.queries):
        assert one.key == other.key and not (one.results[0].correct and other.results[0].correct)


def test_the_queries_of_a_single_run_are_right_as_often_as_all_of_them(views, folders):
    (view,) = views("first")
    recall = read_result(folders / "first")["recall@1"]
    firsts = [query.results[0].correct for query in view.queries]
    assert len(firsts) == 20 and abs(sum(firsts) - 20 * recall) <= 0.5 and view.right.mean() == pytest.approx(recall)
    for shown in range(1, 20):  # also of the rows that are visible first
        assert abs(sum(firsts[:shown]) - shown * recall) <= 0.5 + 1e-9
    assert f"for {sum(firsts)} of these 20, and for {100 * recall:.1f} % of all 36." in view.chosen


def test_runs_on_different_data_are_compared_without_pictures(views, folders, tmp_path):
    """The same queries cannot be shown for both."""
    home = tmp_path / "both"
    shutil.copytree(folders / "first", home / "first")
    train(
        tiny_config(draw_photos(home / "fewer", classes=8), memory__ratio=0.0, optim__iterations=2), home / "other", quiet=True
    )
    assert [list(view.queries) for view in views("first", "other", home=home)] == [[], []]


def test_without_its_images_a_run_is_told_without_pictures(views, folders, tmp_path):
    home = tmp_path / "moved"
    shutil.copytree(folders, home)
    for run in ("first", "base"):
        text = (home / run / "config.yaml").read_text()
        (home / run / "config.yaml").write_text(text.replace(str(folders / "photos"), str(tmp_path / "nowhere")))
    assert [list(view.queries) for view in views("base", "first", home=home)] == [[], []]
    assert views("first", home=home)[0].recall["recall@1"] >= 0


def test_a_single_image_that_has_vanished_does_not_stop_the_page(views, folders, tmp_path):
    home = tmp_path / "moved"
    shutil.copytree(folders, home)
    (home / "first" / "config.yaml").write_text(
        (home / "first" / "config.yaml").read_text().replace(str(folders / "photos"), str(home / "photos"))
    )
    for image in list((home / "photos").rglob("*.png"))[::3]:
        image.unlink()
    (view,) = views("first", home=home)
    assert view.recall and not view.queries


def test_examples_may_be_absent(views, folders, tmp_path):
    home = tmp_path / "bare"
    shutil.copytree(folders, home)
    (home / "first" / "examples.npz").unlink()
    assert list(views("first", home=home)[0].queries) == []


def test_held_out_scores_are_on_the_trace(views, tmp_path):
    photos = draw_photos(tmp_path / "photos")
    config = tiny_config(photos, data__holdout=0.4, log__evaluate_every=5, batch__size=6, optim__iterations=10)
    train(config, tmp_path / "run", quiet=True)
    (view,) = views("run", home=tmp_path)
    assert [step for step, _ in view.trace.evaluations] == [4, 9]
    assert view.data == "photos, held-out classes never seen in training" and len(view.queries) <= 12


def test_a_run_that_is_not_finished_is_told(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} holds no finished run: finish it with `xbm train --resume {tmp_path}`"):
        read_result(tmp_path)
    with pytest.raises(InputError, match=r"config.yaml does not exist"):
        report_runs([tmp_path], tmp_path / "page.html")


def test_the_whole_page(folders, tmp_path):
    page = report_runs([folders / name for name in ("base", "first", "second")], tmp_path / "page.html")
    text = page.read_text()
    figure = json.loads((folders / "first" / "result.json").read_text())["recall@1"]
    assert "What the memory does: photos" in text and text.count("data:image") > 40 and "<script" in text
    assert figure is not None and to_dict(tiny_config(folders / "photos"))["model"]["trunk"] in text


# ------------------------------------------------------------------ the logged curves


@pytest.fixture
def drifting(tmp_path):
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


def test_the_drift_of_a_run_as_a_table_curves_and_a_figure(drifting, tmp_path):
    record = read_drift(drifting)
    # first tenth: iterations 19 to 27; before the decay: 70 to 79; after it: from 90 on
    assert drift_table("x", record) == [["x", "10", "0.9", "0.3", "0.1"]]
    curves = drift_values(record)
    assert list(curves) == ["10"] and curves["10"]["step"][0] == 19 and curves["10"]["drift"][0] == 0.9
    assert "<svg" in draw_drift({"x": record}, tmp_path / "drift.svg").read_text()


def test_what_is_no_run_or_too_young_is_told(drifting, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_drift(tmp_path)
    write_bytes(drifting / "metrics.csv", (",".join(COLUMNS) + "\n").encode(), checksum=True)
    with pytest.raises(InputError, match="has not measured drift yet"):
        read_drift(drifting)
    (drifting / "metrics.csv").unlink()
    with pytest.raises(InputError, match=r"no metrics\.csv"):
        read_drift(drifting)
