import json

import pytest

from tests.tiny import xbm


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
    assert code == 2 and "has the label 'class_9'" in err


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
