import json
import shutil

import pytest

from xbm_app.files import write_json
from xbm_app.train.config import Config, override
from xbm_app.train.load import load
from xbm_app.train.pretrained import licence, write_card


@pytest.mark.parametrize(
    ("trunk", "weights", "words"),
    [
        ("small", "none", "Trained from scratch"),
        ("resnet50", "imagenet", "BSD 3-Clause"),
        ("googlenet", "imagenet", "non-commercial research"),
        ("efficientnet_lite0", "imagenet", "states no license"),
        ("bn_inception", "/home/me/bn.pth", "the file bn.pth: ask"),
        ("timm/resnet18.a1_in1k", "imagenet", "license timm states as apache-2.0"),
    ],
)
def test_the_licence_is_that_of_the_weights_it_began_from(trunk, weights, words):
    told = licence(override(Config(), {"model.trunk": trunk, "model.weights": weights}))
    assert words in told and "/home" not in told


def test_the_card_tells_data_recipe_recall_and_parity(searchable):
    card = write_card(load(searchable), searchable, "Largest difference: none.", {"model.onnx": 1_234_567})
    assert card.startswith("# Model card: run\n") and "`model.onnx` (1.2 MB)" in card and "Largest difference: none." in card
    for heading in ("Files", "Data", "Recall", "Recipe", "License of the weights", "Limits"):
        assert f"\n## {heading}\n" in card
    assert "36 training images of 6 classes" in card and "| optim.iterations | 100 |" in card and "memory.start" not in card
    assert "| R@1 |" in card and "36 queries" in card and "(batch, 1, 16, 16) uint8, grayscale" in card


def test_figures_of_another_iteration_are_told_as_such(searchable):
    embedder = load(searchable)
    assert "last model" not in write_card(embedder, searchable, "", {})
    embedder.step = 60
    card = write_card(embedder, searchable, "", {})
    assert "the run's last model, after iteration 100. The exported model is from iteration 60;" in card


def test_a_run_without_figures_says_so(searchable, tmp_path):
    card = write_card(load(searchable), tmp_path, "", {})
    assert "Not measured: the run was not finished" in card


def test_names_from_outside_are_text_and_not_html(searchable, tmp_path):
    run = shutil.copytree(searchable, tmp_path / "<b>[x](y)|\x1b")
    result = json.loads((run / "result.json").read_text())
    result["data"]["name"], result["protocol"] = "<script>alert(1)</script>", "<i>"
    write_json(run / "result.json", result, checksum=True)
    card = write_card(load(run), run, "", {})
    assert card.startswith("# Model card: &lt;b&gt;\\[x](y)\\|\\u001b\n") and "<" not in card
