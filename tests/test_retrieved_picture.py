"""The script of the README's picture keeps the figures of its caption, with what they are from."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "docs" / "retrieved_picture.py"


@pytest.fixture
def script(monkeypatch):
    functions = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(functions["main"].__globals__, "commit", lambda: "abc1234")  # tests may run outside a git checkout
    return functions


def test_the_figures_by_hand(script):
    without = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=bool)
    with_memory = np.array([[1, 1], [1, 0], [0, 1], [1, 1]], dtype=bool)  # more, as many, fewer, more
    assert script["figures"](np.array(["a", "a", "b", "b"]), [without, with_memory]) == {
        "images": 4, "classes": 2, "recall@1": {"without": 0.5, "with": 0.75},
        "more_right_with_memory": 2, "fewer_right_with_memory": 1, "as_many": 1,
    }  # fmt: skip


def test_the_record_is_written_with_the_picture_and_only_then(script, own_photos, searchable, finished, tmp_path, capsys):
    runs = [searchable, finished]  # without and with memory
    script["main"](own_photos, runs, [], tmp_path)
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    query = script["test_images"](finished)[0][0]
    script["main"](own_photos, runs, [query], tmp_path)
    text = (tmp_path / "retrieved.json").read_text()
    record = json.loads(text)
    assert Image.open(tmp_path / "retrieved.webp").size[0] > 0
    for name, run in zip(("without", "with"), runs):
        result = json.loads((run / "result.json").read_text())
        assert record["recall@1"][name] == pytest.approx(result["recall@1"], abs=1e-6)
        assert f"{name} memory: R@1 {100 * result['recall@1']:.1f} over {record['images']} images" in said
        assert record["runs"][name]["versions"] == result["versions"]
    assert record["runs"]["without"]["config"]["memory.ratio"] == 0 < record["runs"]["with"]["config"]["memory.ratio"]
    assert record["command"].endswith(f"PHOTOS WITHOUT WITH {query}") and record["commit"] == "abc1234" and record["date"]
    assert str(own_photos) not in text and str(finished) not in text
