import shutil

import numpy as np
import pytest

from xbm_app.export.parity import Sample, largest_difference, sample
from xbm_app.train.load import load


def test_it_is_measured_on_the_runs_own_test_images(searchable):
    embedder = load(searchable)
    found = sample(embedder, searchable)
    assert found.source == "36 test images of photos test"  # all there are
    assert found.pixels.shape == (36, 1, 16, 16) and found.wanted.shape == (36, 12)


def test_without_the_data_random_pixels_do_and_it_says_so(searchable, tmp_path):
    run = shutil.copytree(searchable, tmp_path / "run")
    (run / "split.csv").write_text("path,label,split,role\ngone.png,a,train,\ngone.png,b,test,\n")
    found = sample(load(run), run)
    assert "random pixels" in found.source and found.pixels.shape == (100, 1, 16, 16)


@pytest.mark.parametrize("wrong", [0, 7, 44, 99])
def test_one_wrong_number_anywhere_is_seen(wrong):
    pixels = np.arange(100, dtype=np.uint8)[:, None, None, None]
    wanted = np.arange(100, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    asked = []

    def run(part):
        asked.append(len(part))
        return part[:, 0, 0].astype(np.float32) + 0.5 * (part[:, 0, 0] == wrong) * np.array([0, 1, 0])

    assert largest_difference(run, Sample("numbers", pixels, wanted)) == 0.5
    assert sum(asked) == 100 and len(set(asked)) > 1 and 1 in asked
    assert largest_difference(lambda part: part[:, 0, 0] * np.ones((1, 3)), Sample("numbers", pixels[:5], wanted[:5])) == 0
