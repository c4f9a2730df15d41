import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.tiny import tiny_config
from xbm.errors import DamagedFileError, InputError
from xbm_app import export as module
from xbm_app.export import Sample, export_run, largest_difference, run_onnx, run_program, sample
from xbm_app.train.load import load

WITHOUT_XBM = "import sys; sys.modules['xbm'] = sys.modules['torch'] = None; import runpy; sys.argv = sys.argv[1:]; "
WITHOUT_XBM += "runpy.run_path(sys.argv[0], run_name='__main__')"


def test_the_files_are_there_and_equal_the_run(exported):
    assert {path.name for path in exported.folder.iterdir()} == {
        "model.onnx",
        "model.pt2",
        "embed.py",
        "MODEL_CARD.md",
        "checksums.json",
    }
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


@pytest.mark.slow
def test_a_file_that_is_another_model_does_not_stay(searchable, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_onnx", lambda path: lambda pixels: np.ones((len(pixels), 12), np.float32))
    with pytest.raises(InputError, match=r"model\.onnx differed from the run by"):
        export_run(searchable, tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()


# ------------------------------------------------------------------ comparison with the run


def test_it_is_measured_on_the_runs_own_test_images(searchable):
    embedder = load(searchable)
    found = sample(embedder)
    assert found.source == "36 test images of photos test"  # all there are
    assert found.pixels.shape == (36, 1, 16, 16) and found.wanted.shape == (36, 12)


def test_without_the_data_random_pixels_do_and_it_says_so(searchable, tmp_path):
    run = shutil.copytree(searchable, tmp_path / "run")
    (run / "split.csv").write_text("path,label,split,role\ngone.png,a,train,\ngone.png,b,test,\n")
    found = sample(load(run))
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


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_damaged_export_is_noticed_when_it_is_read(exported, tmp_path, name):
    folder = shutil.copytree(exported.folder, tmp_path / "export")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DamagedFileError):
        {"model.onnx": run_onnx, "model.pt2": run_program}[name](folder / name)
    script = [sys.executable, str(folder / "embed.py"), "none.png"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 1 and ("is not as it was exported" in done.stderr) == (name == "model.onnx")


def test_the_script_scales_deep_gray_values_too(exported, searchable, tmp_path):
    ramp = (np.linspace(0, 65535, 400).reshape(20, 20)).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    found = embedded_without_xbm(exported.folder, [tmp_path / "a.png"], tmp_path)
    assert np.abs(found - load(searchable).embed([tmp_path / "a.png"]).numpy()).max() < 1e-4
