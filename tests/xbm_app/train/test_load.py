import numpy as np
import pytest
import torch
from PIL import Image

import xbm
from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm_app.files import read_checkpoint, write_checkpoint
from xbm_app.train.dataset import read_run
from xbm_app.train.load import evaluate_run, load
from xbm_app.train.loop import train


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("load") / "run"
    train(tiny_config(photos, data__holdout=0.4, log__evaluate_every=2, batch__size=6, optim__iterations=5), folder, quiet=True)
    return folder


def test_images_become_unit_vectors_however_they_come(run, photos):
    paths = sorted(photos.rglob("*.png"))[:5]
    model = xbm.load(run)
    vectors = model.embed(paths)
    assert vectors.shape == (5, 12) == (5, model.dim) and vectors.dtype == torch.float32
    assert torch.allclose(vectors.norm(dim=1), torch.ones(5), atol=1e-5)
    opened = [Image.open(path) for path in paths]
    assert torch.equal(model.embed(opened), vectors)
    assert torch.equal(model.embed([np.asarray(image) for image in opened]), vectors)
    assert torch.equal(model.embed(str(path) for path in paths), vectors)
    torch.testing.assert_close(torch.cat([model.embed([path]) for path in paths]), vectors)


def test_sizes_and_modes_may_differ(run):
    images = [Image.new("L", (30, 9), 100), np.zeros((7, 40), np.uint8), Image.new("RGBA", (16, 16))]
    assert xbm.load(run).embed(images).shape == (3, 12)


def test_no_images_no_vectors(run):
    assert xbm.load(run).embed([]).shape == (0, 12)


@pytest.mark.parametrize("bad", [np.zeros((4, 4)), np.zeros((4, 4, 1), np.uint8), np.zeros((4,), np.uint8)])
def test_arrays_that_are_no_images_are_refused(run, bad):
    with pytest.raises(InputError, match=r"an image array must be uint8 of shape \(H, W\) or \(H, W, 3\)"):
        xbm.load(run).embed([bad])


def test_a_path_that_is_no_image_is_named(run, tmp_path):
    (tmp_path / "no.png").write_text("no picture")
    with pytest.raises(InputError, match=r"no.png cannot be read as an image"):
        xbm.load(run).embed([tmp_path / "no.png"])
    with pytest.raises(InputError, match=r"none.png is missing"):
        xbm.load(run).embed([tmp_path / "none.png"])


def test_the_best_checkpoint_is_taken_where_one_was_chosen(run, tmp_path):
    best = read_checkpoint(run / "checkpoints" / "best.pt")
    assert load(run).step == best["step"] and load(run / "checkpoints" / "last.pt").step == 5
    assert torch.equal(load(run).model.head.weight, best["model"]["head.weight"])


def test_it_knows_its_config_and_classes(run, photos):
    model = load(run)
    assert model.config == tiny_config(photos, data__holdout=0.4, log__evaluate_every=2, batch__size=6, optim__iterations=5)
    assert model.classes == list(read_run(model.config, run).train.class_names) and len(model.classes) == 4
    assert not model.model.training


def test_a_set_is_embedded_in_its_order_whatever_the_batch(run):
    images = read_run(load(run).config, run).train
    model = load(run)
    torch.testing.assert_close(model.embed_set(images, batch_size=7), model.embed_set(images))
    torch.testing.assert_close(model.embed_set(images)[[3]], model.embed([images.open(3)]))


def test_weights_are_not_fetched_again(run, tmp_path):
    state = read_checkpoint(run / "checkpoints" / "last.pt")
    state["config"]["model"]["weights"] = "/gone/with/the/wind.pth"
    write_checkpoint(tmp_path / "last.pt", state)
    assert load(tmp_path / "last.pt").step == 5


def test_what_holds_no_model_is_refused(run, tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} holds no checkpoint: pass a run folder created by `xbm train`"):
        load(tmp_path)
    state = read_checkpoint(run / "checkpoints" / "last.pt")
    state["config"]["model"]["dim"] = 99
    write_checkpoint(tmp_path / "last.pt", state)
    with pytest.raises(InputError, match="does not fit its own config"):
        load(tmp_path / "last.pt")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_scores_again_as_it_did_at_its_end(photos, tmp_path, precision):
    result = train(tiny_config(photos, optim__precision=precision), tmp_path / "run", quiet=True)
    again = evaluate_run(tmp_path / "run")
    assert again["protocols"].keys() == result["protocols"].keys() == {"test"}
    assert again["protocols"]["test"] == result["protocols"]["test"]  # on a CPU, to the last bit
    assert again["iterations"] == 17 and again["protocol"] == "test"


def test_held_out_classes_are_scored_where_some_were(photos, tmp_path):
    result = train(tiny_config(photos, data__holdout=0.4, batch__size=6, optim__iterations=2), tmp_path / "run", quiet=True)
    again = evaluate_run(tmp_path / "run" / "checkpoints" / "last.pt")
    assert again["protocol"] == "held-out" and again["queries"] == result["queries"] == 12
    assert again["recall@1"] == result["recall@1"]


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint"):
        evaluate_run(tmp_path)


def test_the_scores_of_a_run_are_those_of_the_checkpoint_that_load_takes(photos, tmp_path):
    config = tiny_config(photos, data__holdout=0.4, log__evaluate_every=3, batch__size=6, optim__lr=3e-3)
    result = train(config, tmp_path / "run", quiet=True)
    again = evaluate_run(tmp_path / "run")
    assert result["checkpoint"] == again["checkpoint"] == "best.pt"
    assert result["checkpoint_iterations"] == again["checkpoint_iterations"] == load(tmp_path / "run").step < 17
    assert again["protocols"] == result["protocols"] and result["iterations"] == 17
    plain = train(tiny_config(photos, optim__iterations=2), tmp_path / "plain", quiet=True)
    assert (plain["checkpoint"], plain["checkpoint_iterations"]) == ("last.pt", 2)
