import shutil
import sys

import pytest

from tests.tiny import xbm
from xbm_app.search import neighbours


@pytest.fixture
def photos(own_photos, tmp_path):
    return shutil.copytree(own_photos, tmp_path / "photos")


def test_an_index_is_made_then_brought_up_to_date(searchable, photos, tmp_path):
    out = tmp_path / "index"
    code, said, err = xbm("index", searchable, photos, "--out", out)
    assert code == 0, err
    first, second, last = said.splitlines()
    assert first == "72 embedded (72 new, 0 changed), 0 removed, 0 unchanged" and last == str(out)
    assert second.startswith("exact index of 72 images") and "recall@10 against exact search 1.000" in second
    (photos / "class_00" / "0.png").unlink()
    (photos / "class_00" / "1.png").write_text("broken")
    code, said, err = xbm("index", searchable, photos, "--out", out)
    assert code == 0 and said.startswith("0 embedded (0 new, 1 changed), 1 removed, 70 unchanged, 1 left out\n")
    assert err.count("\n") == 1 and err.startswith("note: ") and "class_00/1.png cannot be read as an image" in err


def test_a_large_index_is_compressed_and_its_recall_is_measured(searchable, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "EXACT_BYTES", 100)
    code, said, err = xbm("index", searchable, photos, "--out", tmp_path / "index")
    assert code == 0 and "compressed index of 72 images" in said and "measured on up to 256 images" in said, err
    assert xbm("search", tmp_path / "index", photos / "class_00" / "0.png").code == 0


def test_by_default_it_lies_in_the_run(searchable, photos, tmp_path):
    run = shutil.copytree(searchable, tmp_path / "run")
    assert xbm("index", run, photos).out.endswith(f"{run / 'index'}\n")
    assert "class_00/0.png" in xbm("search", run, photos / "class_00" / "0.png").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "PHOTOS"], "nowhere does not exist: give a run folder"),
        (["RUN", "nowhere"], "nowhere is neither a folder nor"),
        (["PHOTOS", "PHOTOS"], "holds no checkpoint"),
    ],
)
def test_bad_input(searchable, photos, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    named = {"RUN": searchable, "PHOTOS": photos}
    code, _, err = xbm("index", *(named.get(word, word) for word in words), "--out", "index")
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "index").exists()


def test_a_missing_package_is_named(searchable, photos, monkeypatch):
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None)
    code, _, err = xbm("index", searchable, photos)
    assert code == 2 and err == "error: this needs the package faiss: pip install 'xbm[search]'\n"
    assert sys.modules  # the command itself needs nothing more to say so
