"""Shared by the tests of searching and serving: a toy encoder of one's own, as CLIP is, and pictures for it."""

import signal
import sys

import pytest
from PIL import Image

ENCODER = """
import numpy as np

COLORS = {"red": (1, 0, 0), "green": (0.1, 1, 0.1), "blue": (0.1, 0.1, 1)}

class Encoder:
    def __call__(self, images):
        return np.stack([np.asarray(image).reshape(-1, 3).mean(0) for image in images])

    def encode_text(self, texts):
        return np.array([COLORS[text] for text in texts])

def images_only(images):
    return [[1.0, 2.0, 3.0] for _ in images]

def broken(images):
    return np.full((len(images), 3), np.nan)
"""


@pytest.fixture
def own_encoder(tmp_path, monkeypatch):
    """The name of a toy encoder that maps pictures and the names of colors to the same space."""
    name = f"toy_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def colors(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for k, color in enumerate([(250, 5, 5), (200, 30, 20), (5, 240, 9), (10, 20, 230)]):
        Image.new("RGB", (20, 20), color).save(folder / f"{k}.png")
    (tmp_path / "table.csv").write_text("path,label,Price\n" + "".join(f"photos/{k}.png,x,{10 * k}\n" for k in range(4)))
    return tmp_path / "table.csv"


@pytest.fixture
def no_waiting():
    """Interrupts a test that waits for a pipe."""

    def interrupt(*_):
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
