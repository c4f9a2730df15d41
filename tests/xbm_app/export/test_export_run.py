import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm_app.export import run as module
from xbm_app.export.run import export_run
from xbm_app.train.load import load

WITHOUT_XBM = "import sys; sys.modules['xbm'] = sys.modules['torch'] = None; import runpy; sys.argv = sys.argv[1:]; "
WITHOUT_XBM += "runpy.run_path(sys.argv[0], run_name='__main__')"


def test_the_files_are_there_and_equal_the_run(exported):
    assert {path.name for path in exported.folder.iterdir()} == {"model.onnx", "model.pt2", "embed.py", "MODEL_CARD.md"}
    assert exported.difference.keys() == {"model.onnx", "model.pt2"} and max(exported.difference.values()) < 1e-5


def embedded_without_xbm(folder, paths, tmp_path):
    command = [sys.executable, "-c", WITHOUT_XBM, str(folder / "embed.py"), *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "embeddings.npz") as file:
        return file["embeddings"]


def test_the_script_needs_no_xbm_and_equals_the_run_on_100_images(exported, searchable, tmp_path):
    """Of many sizes and kinds: large JPEGs that are decoded smaller, grey, transparent, on their side."""
    draw, paths = np.random.default_rng(0), []
    for k in range(100):
        width, height = draw.integers(5, 300, 2).tolist()
        image = Image.effect_noise((width, height), 90).convert(["RGB", "L", "P", "RGBA"][k % 4])
        image.paste(draw.integers(0, 255, len(image.getbands())).tolist()[0], (0, 0, width // 2, height // 3))
        paths.append(tmp_path / f"{k}.{'png' if k % 4 > 1 else 'jpg'}")
        exif = Image.Exif()
        exif[0x0112] = 1 + k % 8
        image.save(paths[-1], exif=exif) if k % 4 < 2 else image.save(paths[-1])
    found = embedded_without_xbm(exported.folder, paths, tmp_path)
    wanted = load(searchable).embed_set(listed(paths)).numpy()
    assert found.shape == (100, 12) and np.abs(found - wanted).max() < 1e-4
    assert np.abs(wanted - wanted[:1]).max() > 0.05  # the images are told apart


def listed(paths):
    from xbm_app.data.images import ImageSet

    labels = np.zeros(len(paths), np.int64)
    return ImageSet("images", labels, ["image"], root=paths[0].parent, paths=[path.name for path in paths])


@pytest.mark.slow
def test_the_other_way_to_resize_is_exported_too(own_photos, tmp_path):
    from xbm_app.train.loop import train

    run = tmp_path / "run"
    train(tiny_config(own_photos, data__augmentation="official", data__resize=20, optim__iterations=3), run, quiet=True)
    made = export_run(run, tmp_path / "out")
    paths = [tmp_path / f"{k}.png" for k in range(4)]
    for path, size in zip(paths, [(40, 30), (30, 70), (16, 160), (200, 16)]):
        Image.effect_noise(size, 90).convert("RGB").save(path)
    assert np.abs(embedded_without_xbm(made.folder, paths, tmp_path) - load(run).embed_set(listed(paths)).numpy()).max() < 1e-4


def test_a_file_that_is_another_model_does_not_stay(searchable, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_onnx", lambda path: lambda pixels: np.ones((len(pixels), 12), np.float32))
    with pytest.raises(InputError, match=r"model\.onnx differed from the run by"):
        export_run(searchable, tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()
