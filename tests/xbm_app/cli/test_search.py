import json
import shutil
import sys

import pytest

from tests.tiny import xbm
from xbm_app.search import neighbours


@pytest.fixture(scope="module")
def index(searchable, own_photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("searched") / "index"
    assert xbm("index", searchable, own_photos, "--out", out).code == 0
    return out


def test_a_table_with_similarity_label_and_path(index, own_photos):
    code, out, err = xbm("search", index, own_photos / "class_04" / "3.png", "--top", 3)
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert rows[0] == ["1", "1.0000", "class_04", str(own_photos / "class_04" / "3.png")] and len(rows) == 3


def test_json_for_several_queries(index, own_photos):
    queries = [own_photos / "class_04" / "3.png", own_photos / "class_05" / "0.png"]
    code, out, err = xbm("search", index, *queries, "--top", 2, "--json")
    found = json.loads(out)
    assert code == 0 and [each["query"] for each in found] == [str(query) for query in queries], err
    for query, each in zip(queries, found):
        assert len(each["results"]) == 2 and each["results"][0]["path"] == str(query)
        assert each["results"][0]["similarity"] == pytest.approx(1, abs=1e-5)


def test_a_label_narrows_it(index, own_photos):
    _, out, _ = xbm("search", index, own_photos / "class_04" / "3.png", "--label", "class_09", "--json")
    assert {result["label"] for result in json.loads(out)[0]["results"]} == {"class_09"}
    code, _, err = xbm("search", index, own_photos / "class_04" / "3.png", "--label", "class_9")
    assert code == 2 and "meets label=class_9" in err


def test_a_sheet_on_request(index, own_photos, tmp_path):
    code, out, err = xbm("search", index, own_photos / "class_04" / "3.png", "--sheet", tmp_path / "s.html")
    assert code == 0 and out.endswith(f"{tmp_path / 's.html'}\n"), err
    assert (tmp_path / "s.html").read_text().count("<img") == 11


def test_a_broken_query_is_told_and_the_others_are_answered(index, own_photos, tmp_path):
    (tmp_path / "text.jpg").write_text("text")
    code, out, err = xbm(
        "search", index, tmp_path / "text.jpg", own_photos / "class_04" / "3.png", tmp_path / "no.png", "--json"
    )
    assert code == 2 and len(json.loads(out)) == 1
    assert err.count("\n") == 2 and "text.jpg cannot be read as an image" in err and "no.png does not exist" in err


def test_what_is_no_index_says_so(searchable, own_photos):
    code, _, err = xbm("search", searchable, own_photos / "class_04" / "3.png")
    assert code == 2 and "is not an index: make one with `xbm index" in err and err.count("\n") == 1


@pytest.fixture
def photos(own_photos, tmp_path):
    return shutil.copytree(own_photos, tmp_path / "photos")


def test_an_index_is_made_then_brought_up_to_date(searchable, photos, tmp_path):
    out = tmp_path / "index"
    code, said, err = xbm("index", searchable, photos, "--out", out)
    assert code == 0, err
    first, second, last = said.splitlines()
    assert first == "72 embedded (72 new, 0 changed), 0 removed, 0 unchanged" and last == str(out)
    assert second.startswith("exact index of 72 images") and "recall@10 is 1.000" in second
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
        (["nowhere", "PHOTOS"], "nowhere does not exist: pass a run folder"),
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
    assert code == 2 and err == "error: this needs the package faiss: pip install 'xbm[serve]'\n"
    assert sys.modules  # the command itself needs nothing more to say so


def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    code, _, err = xbm("serve", tmp_path, "--port", 0)
    assert code == 2 and "is not an index: make one with `xbm index" in err and err.count("\n") == 1
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None)
    code, _, err = xbm("serve", tmp_path)
    assert code == 2 and "faiss, fastapi, uvicorn, python_multipart: pip install 'xbm[serve]'" in err


def test_the_options_reach_the_server(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("xbm_app.serve.server.serve", lambda *given: asked.append(given))
    monkeypatch.setenv("XBM_TOKEN", "mine")
    assert xbm("serve", "a", "b", "--host", "0.0.0.0", "--port", 9, "--allow-host", "x", "--allow-host", "y").code == 0
    ((folders, *rest),) = asked
    assert folders == ["a", "b"] and rest == ["0.0.0.0", 9, ["x", "y"], "mine", None]


@pytest.mark.parametrize("words", [("search", "--sheet"), ("report", "--out"), ("evaluate", "--json"), ("compare", "--out")])
def test_a_picture_is_not_overwritten_by_a_page(index, searchable, photos, words):
    picture = photos / "class_04" / "3.png"
    before = picture.read_bytes()
    given = {"search": (index, picture), "compare": (searchable, searchable)}.get(words[0], (searchable,))
    code, _, err = xbm(words[0], *given, words[1], picture)
    assert code == 2 and "must end in ." in err and picture.read_bytes() == before
