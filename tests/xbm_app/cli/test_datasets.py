import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from tests.tiny import draw_photos, set_options, xbm
from xbm.errors import InputError
from xbm_app.cli.datasets import app, prepare
from xbm_app.data import benchmarks
from xbm_app.data.benchmarks import BENCHMARKS, Count
from xbm_app.data.own_images import read_folder
from xbm_app.data.store import open_store

COLUMNS = {"train": Count(4, 2), "test": Count(6, 3)}


@pytest.fixture
def letters(tmp_path, monkeypatch) -> Path:
    """Omniglot with two characters to train on and three to test on, two drawings each, held to be its release."""
    for half, characters in (("train", "ab"), ("test", "cde")):
        for character in characters:
            for drawing in (1, 2):
                file = tmp_path / half / character / f"0001_{drawing:02d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (20, 20), ord(character) + drawing * 20).save(file)
    paper = {"train": Count(5, 2), "test": Count(6, 3)}
    whole = replace(BENCHMARKS["omniglot"], release=COLUMNS, paper=paper, missing=lambda dataset: [])
    monkeypatch.setitem(benchmarks.BENCHMARKS, "omniglot", whole)
    return tmp_path


def check(root: Path):
    return CliRunner().invoke(app, ["check", "omniglot", "--root", str(root)])


def test_the_list_says_where_each_benchmark_comes_from_and_what_it_should_look_like():
    text = CliRunner().invoke(app, []).stdout
    for benchmark in BENCHMARKS.values():
        for line in (benchmark.source, benchmark.terms, *benchmark.layout.splitlines()):
            assert line in text
    assert "train 113,346 images / 13,164 classes" in text and "train 110,178 images / 13,134 classes" in text


def test_help_shows_an_example_and_imports_nothing_heavy():
    assert "xbm datasets check cars" in CliRunner().invoke(app, ["--help"]).stdout
    assert "xbm datasets check cars" in CliRunner().invoke(app, ["check", "--help"]).stdout
    heavy = "import sys, xbm_app.cli.datasets; print([m for m in ('torch', 'numpy', 'PIL', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_whole_copy_passes_with_the_papers_counts_beside_the_release(letters):
    result = check(letters)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        "part   here                  release               paper",
        "train  4 images / 2 classes  4 images / 2 classes  5 images / 2 classes",
        "test   6 images / 3 classes  6 images / 3 classes  6 images / 3 classes",
        "The counts match the release and every image opens.",
    ]


def test_a_broken_image_is_named_and_fails_though_the_counts_are_right(letters):
    (letters / "test" / "d" / "0001_02.png").write_bytes(b"\x89PNG\r\n cut")
    result = check(letters)
    assert "1 image not readable as an image:\n  test/d/0001_02.png" in result.stdout
    assert isinstance(result.exception, InputError)
    assert "1 of its images cannot be opened" in str(result.exception)


def test_the_first_count_that_is_off_is_told_after_the_table(letters):
    (letters / "train" / "a" / "0001_02.png").unlink()
    (letters / "test" / "d" / "0001_02.png").unlink()
    result = check(letters)
    assert str(result.exception).endswith("incomplete: train has 3 images where the release has 4")
    assert "train  3 images / 2 classes  4 images / 2 classes" in result.stdout


def test_images_that_no_list_names_are_named_by_the_benchmark(letters, monkeypatch):
    lost = [f"test/e/0002_{number:02d}.png" for number in range(1, 26)]
    monkeypatch.setitem(
        benchmarks.BENCHMARKS, "omniglot", replace(BENCHMARKS["omniglot"], release={"train": Count(9)}, missing=lambda d: lost)
    )
    result = check(letters)
    assert "25 images of the release are missing:\n  test/e/0002_01.png\n" in result.stdout
    assert "  ... and 5 more" in result.stdout
    assert isinstance(result.exception, InputError)


def test_an_unknown_name_is_told_the_nearest(tmp_path):
    result = CliRunner().invoke(app, ["check", "car", "--root", str(tmp_path)])
    assert "did you mean 'cars'" in str(result.exception)


def test_the_closest_glyphs_are_drawn(tmp_path, monkeypatch):
    from PIL import Image

    from xbm_app.cli.datasets import glyphs
    from xbm_app.data import glyph_classes as glyph_sheet
    from xbm_app.data import glyphs as source

    monkeypatch.setattr(source, "read_glyphs", lambda: "data")
    monkeypatch.setattr(glyph_sheet, "near_neighbours_sheet", lambda data, pairs: Image.new("L", (pairs, 3)))
    glyphs(tmp_path / "near.png", pairs=7)
    assert Image.open(tmp_path / "near.png").size == (7, 3)


def test_the_sheet_of_glyphs_is_a_png_with_pairs(tmp_path):
    result = CliRunner().invoke(app, ["glyphs", str(tmp_path / "near.txt")])
    assert "near.txt must end in .png" in str(result.exception)
    assert CliRunner().invoke(app, ["glyphs", str(tmp_path / "near.png"), "--pairs", "0"]).exit_code == 2


prepare_app = typer.Typer()
prepare_app.command()(prepare)


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
    return CliRunner().invoke(prepare_app, [str(argument) for argument in arguments])


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
    assert sorted(path.name for path in out.iterdir()) == ["checksums.json", "dataset.json", "test", "train"]
    assert xbm_prepare(photos, "--out", out, "--resize", 16).exit_code == 0


def test_the_released_codes_resize_keeps_the_aspect(photos, tmp_path):
    done = xbm_prepare(photos, "--out", tmp_path / "store", "--resize", 16, "--mode", "shorter", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert open_store(tmp_path / "store" / "train", None).view(0).shape == (16, 21, 3)


def test_mistakes_are_told_in_one_sentence(photos, tmp_path):
    for arguments, message in (
        (("carz",), "unknown benchmark or folder 'carz': did you mean 'cars'"),
        (("cars",), "the folder with cars is not set"),
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


def test_a_store_of_ones_own_images_is_trained_on_without_the_images(tmp_path):
    photos = draw_photos(tmp_path / "photos")
    draw_photos(tmp_path / "one", classes=1, each=1).joinpath("class_00").rename(photos / "single")
    assert xbm("prepare", photos, "--out", tmp_path / "store", "--resize", 16).code == 0
    shutil.rmtree(photos)
    for name, options in (("plain", ()), ("skipped", ("--skip-problems",))):
        out = tmp_path / name
        words = ("train", "own", "--store", tmp_path / "store", "--trunk", "small", "--quiet", "--out", out, *options)
        code, _, err = xbm(*words, *set_options(optim__iterations=2, optim__decay_at=(1,)))
        assert code == 0, err
        assert xbm("evaluate", out).code == 0 and xbm("train", "--resume", out, "--quiet").code == 0
    count = [json.loads((tmp_path / name / "result.json").read_text())["data"]["train_images"] for name in ("plain", "skipped")]
    assert count[0] - count[1] in (0, 1)  # the class of a single image, if it is one to train on


def test_names_of_files_do_not_reach_the_terminal_as_commands(photos, tmp_path):
    (photos / "a" / "\x1b[2Jx\n.png").write_text("not an image")
    code, _, err = xbm("train", "--data", photos, "--trunk", "small", "--out", tmp_path / "run", *set_options())
    assert code == 2 and "\x1b" not in err and "\\u001b[2Jx\\u000a.png" in err and not (tmp_path / "run").exists()
