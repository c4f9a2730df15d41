import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from xbm.memory import CrossBatchMemory
from xbm.retrieval import evaluate
from xbm_app.data.images import Protocol
from xbm_app.files import read_checkpoint
from xbm_app.train.dataset import read_run
from xbm_app.train.finish import ALIKE, DOUBTED, MINED, NEIGHBOURS, hints, recall_curve
from xbm_app.train.label_errors import IGNORED, find_label_errors
from xbm_app.train.load import load
from xbm_app.train.loop import train


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finish") / "run"
    return folder, train(tiny_config(photos), folder, quiet=True), read_run(tiny_config(photos), folder)


@pytest.mark.parametrize(
    ("device", "changes", "iterations", "told"),
    [
        ("cpu", {"weights": "imagenet"}, 2000, ["model.freeze=trunk", "optim.iterations=350"]),
        ("cpu", {"weights": "imagenet", "freeze": "trunk"}, 2000, ["optim.iterations=350"]),
        ("cuda", {"weights": "imagenet"}, 2000, ["optim.iterations=350"]),
        ("cpu", {"weights": "none"}, 350, []),
    ],
)
def test_a_slow_device_and_few_images_are_told_of_what_helps(photos, device, changes, iterations, told):
    config = tiny_config(photos)
    config = replace(
        config,
        model=replace(config.model, **changes),
        optim=replace(config.optim, iterations=iterations),
        batch=replace(config.batch, size=32),
    )
    run = SimpleNamespace(config=config, device=torch.device(device), dataset=SimpleNamespace(train=range(112)))
    said = list(hints(run))
    assert len(said) == len(told) and all(word in text for word, text in zip(told, said))


def test_the_result_is_what_is_on_the_disk(run):
    folder, result, dataset = run
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["protocol"] == "test" and result["protocols"]["test"].items() <= result.items()
    assert result["data"] == {"name": "photos", "train_images": len(dataset.train), "train_classes": 6, "shared_classes": 0}
    assert result["iterations"] == 17 and result["seed"] == 0 and result["seconds_per_iteration"] > 0
    assert result["versions"]["torch"] == torch.__version__ and result["notes"] == []


def test_the_figures_are_those_of_the_models_embeddings(run):
    folder, result, dataset = run
    images = dataset.protocols[0].query
    again = evaluate(load(folder).embed_set(images), images.labels, ks=dataset.protocols[0].ks)
    assert {name: result[name] for name in again} == pytest.approx(again)


def test_the_curve_is_recall_at_each_k(run):
    _, result, dataset = run
    assert len(result["curve"]) == 32
    assert [result["curve"][k - 1] for k in dataset.protocols[0].ks] == pytest.approx(
        [result[f"recall@{k}"] for k in dataset.protocols[0].ks]
    )


def test_a_gallery_has_a_curve_too(run):
    _, _, dataset = run
    images = dataset.protocols[0].query
    protocol = Protocol("query/gallery", images, (1,), gallery=dataset.train)
    queries = torch.nn.functional.one_hot(torch.as_tensor(images.labels), 6).float()
    searched = torch.nn.functional.one_hot(torch.as_tensor(dataset.train.labels), 6).float()
    assert recall_curve(protocol, {id(images): queries, id(dataset.train): searched}, up_to=3) == [1.0, 1.0, 1.0]


def test_examples_name_the_neighbours_of_every_query(run):
    folder, _, dataset = run
    images = dataset.protocols[0].query
    vectors = load(folder).embed_set(images)
    with np.load(folder / "examples.npz") as found:
        neighbours, similarities = found["neighbours"], found["similarities"]
    assert neighbours.shape == (len(images), NEIGHBOURS)
    assert not (neighbours == np.arange(len(images))[:, None]).any()  # no image is its own neighbour
    wanted = (vectors @ vectors.T).fill_diagonal_(-2).topk(NEIGHBOURS).values
    np.testing.assert_allclose(similarities, wanted, atol=1e-5)


def test_mined_negatives_are_of_other_classes_hardest_first(run):
    folder, _, dataset = run
    labels = dataset.train.labels
    with np.load(folder / "examples.npz") as found:
        mined = {name: found[name] for name in found.files if name.startswith("mined_")}
    assert len(mined["mined_anchor"]) == 8  # the batch is smaller than the twelve that are shown
    for k, (anchor, positive) in enumerate(zip(mined["mined_anchor"], mined["mined_positive"])):
        assert labels[anchor] == labels[positive] and anchor != positive
        for pool in ("batch", "memory"):
            ids, similarities = mined[f"mined_{pool}"][k], mined[f"mined_{pool}_s"][k]
            there = ids >= 0
            assert there.any() and (labels[ids[there]] != labels[anchor]).all() and np.isnan(similarities[~there]).all()
            assert (np.diff(similarities[there]) <= 0).all()
        assert there.all() and len(there) == MINED  # the memory has enough of them


def test_without_memory_only_the_batch_is_mined(photos, tmp_path):
    train(tiny_config(photos, memory__ratio=0.0, optim__iterations=2), tmp_path / "run", quiet=True)
    with np.load(tmp_path / "run" / "examples.npz") as found:
        assert found["mined_memory"].size == 0 and found["mined_batch"].shape == (8, MINED)


def test_the_folder_holds_what_it_should_and_nothing_half_written(run):
    folder, _, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names - {"checksums.json"} == {
        "checkpoints",
        "config.yaml",
        "examples.npz",
        "metrics.csv",
        "result.json",
        "split.csv",
        "tensorboard",
    }
    assert not list(folder.rglob("*.part*"))


def test_labels_in_doubt_are_listed_for_a_person_to_look_at(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("xbm_app.train.state.CHECK_STEPS", 5)  # of 17: since the last look some were written anew
    monkeypatch.setattr("xbm_app.train.label_errors.MOST", 1.0)
    config = tiny_config(photos, memory__update="moving_average", memory__doubt="skip", data__noise=0.2)
    train(config, tmp_path / "run")
    images = read_run(config, tmp_path / "run").train
    memory = CrossBatchMemory(len(images), config.model.dim, "moving_average")
    memory.load_state_dict(read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["memory"])
    found = [each.tolist() for each in find_label_errors(memory, images.num_classes)]
    names = images.class_names
    rows = (tmp_path / "run" / "doubted.csv").read_text("utf-8").split("\n")
    score = [f"{0.5 - lead / 4:.4f}" for lead in found[2]]  # as in cleanlab, smaller is more likely an error
    lines = [f"{images.paths[k]},{names[images.labels[k]]},{names[c]},{s},True" for k, c, s in zip(*found[:2], score)]
    assert rows == ["filepath,given_label,predicted_label,label_score,is_label_issue", *lines, ""]
    assert [float(each) for each in score] == sorted(map(float, score)) and float(score[0]) >= 0 and float(score[-1]) <= 0.5
    said = f"{len(lines)} of {len(images)} training images lie among those of other classes"
    assert said in capsys.readouterr().err
    assert {bool(memory.stamps[k] == IGNORED) for k in found[0]} == {True, False}  # of before, and since the last look

    with np.load(tmp_path / "run" / "examples.npz") as kept:
        shown = {name: kept[f"doubted_{name}"] for name in ("image", "nearest", "own", "own_s", "other", "other_s")}
    assert shown["image"].tolist() == found[0][:12] and shown["nearest"].tolist() == found[1][:12]
    counts, s = (memory.stamps >= 0).numpy(), (memory.rows @ memory.rows.T).numpy()
    for n, k in enumerate(shown["image"]):
        for name, label in (("own", images.labels[k]), ("other", shown["nearest"][n])):
            members = [j for j in np.flatnonzero(counts & (np.asarray(images.labels) == label)) if j != k]
            wanted = sorted(members, key=lambda j: -s[k, j])[:ALIKE]
            assert shown[name][n].tolist() == [*wanted, *[-1] * (ALIKE - len(wanted))]
            np.testing.assert_allclose(shown[f"{name}_s"][n][: len(wanted)], s[k, wanted], atol=1e-5)
    assert (shown["own"] == -1).any()


def test_a_run_that_could_doubt_no_label_says_so(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("xbm_app.train.label_errors.MOST", 0.0)
    config = tiny_config(photos, memory__update="moving_average", memory__doubt="skip", data__noise=0.5)
    result = train(config, tmp_path / "run")
    said = "training images lie among those of other classes, so no label was treated as wrong"
    assert said in capsys.readouterr().err and (tmp_path / "run" / "doubted.csv").read_text() == ",".join(DOUBTED) + "\n"
    assert [severity for severity, text in result["notes"] if said in text] == ["warning"]


def test_a_run_that_is_stopped_before_all_is_written_is_not_finished(photos, tmp_path, monkeypatch):
    config = tiny_config(photos, memory__update="moving_average", memory__doubt="skip", optim__iterations=2)
    for name in ("write_label_errors", "write_examples"):
        with monkeypatch.context() as patch:
            patch.setattr(f"xbm_app.train.finish.{name}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train(config, tmp_path / name, quiet=True)
        assert not (tmp_path / name / "result.json").exists()
