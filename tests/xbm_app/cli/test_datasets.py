import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from xbm.errors import InputError
from xbm_app.cli.datasets import app
from xbm_app.data import benchmarks
from xbm_app.data.benchmarks import BENCHMARKS, Count

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
        "The counts are those of the release and every image opens.",
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
    assert str(result.exception).endswith("not whole: train has 3 images where the release has 4")
    assert "train  3 images / 2 classes  4 images / 2 classes" in result.stdout


def test_images_that_no_list_names_are_named_by_the_benchmark(letters, monkeypatch):
    lost = [f"test/e/0002_{number:02d}.png" for number in range(1, 26)]
    monkeypatch.setitem(
        benchmarks.BENCHMARKS, "omniglot", replace(BENCHMARKS["omniglot"], release={"train": Count(9)}, missing=lambda d: lost)
    )
    result = check(letters)
    assert "25 images of the release not there:\n  test/e/0002_01.png\n" in result.stdout
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
