import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from xbm.errors import InputError
from xbm_app.cli.prepare import prepare
from xbm_app.data.own_images import read_folder
from xbm_app.data.store import open_store

app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for label in "abcdef":
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


def xbm_prepare(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_folder_becomes_a_store_of_each_of_its_sets(photos, tmp_path):
    out = tmp_path / "store"
    done = xbm_prepare(photos, "--out", out, "--resize", 16)
    assert done.exit_code == 0, done.output
    assert "18 images in 2 sets: about 0.00 GB to write" in done.output
    data = read_folder(photos)
    for images in (data.train, data.protocols[0].query):
        store = open_store(out, images)
        assert len(store) == len(images)
        assert store.view(1).shape == (16, 16, 3)
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "test", "train"]
    assert xbm_prepare(photos, "--out", out, "--resize", 16).exit_code == 0


def test_the_released_codes_resize_keeps_the_aspect(photos, tmp_path):
    done = xbm_prepare(photos, "--out", tmp_path / "store", "--resize", 16, "--mode", "shorter", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert open_store(tmp_path / "store" / "train", None).view(0).shape == (16, 21, 3)


def test_mistakes_are_told_in_one_sentence(photos, tmp_path):
    for arguments, message in (
        (("carz",), "unknown benchmark or folder 'carz': did you mean 'cars'"),
        (("cars",), "say where cars is"),
        ((photos, "--mode", "sqare"), "unknown resize mode 'sqare': did you mean 'square'"),
    ):
        done = xbm_prepare(*arguments, "--out", tmp_path / "store")
        assert isinstance(done.exception, InputError)
        assert message in str(done.exception)
        assert not (tmp_path / "store").exists()


def test_a_run_folder_is_left_alone(photos, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0")
    done = xbm_prepare(photos, "--out", run)
    assert isinstance(done.exception, InputError) and "is a run folder" in str(done.exception)
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_help_shows_an_example():
    assert "xbm prepare cars --root" in " ".join(xbm_prepare("--help").output.split())
