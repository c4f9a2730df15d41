"""Embeddings made elsewhere, and the commands that take them."""

import io
import json
import os
import textwrap
from contextlib import closing
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.xbm_app.search.test_neighbours import unit
from xbm.errors import InputError
from xbm_app.cli import app
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.embeddings import is_embeddings, read_embeddings, write_parquet
from xbm_app.search.filters import filters_of
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import Changes, update_embeddings

COLUMNS = {"path": [f"{k}.png" for k in range(9)], "label": list("aabbccddd"), "price": [*range(8), None]}


def table(path, vectors, kind="fixed", name="embedding", /, **columns):
    if kind == "fixed":
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    else:
        lists = pa.array([row.tolist() for row in vectors], pa.list_(pa.float64()))
    pq.write_table(pa.table({**columns, name: lists}), path)
    return path


@pytest.mark.parametrize(("kind", "name"), [("fixed", "embedding"), ("lists", "clip_features")])
def test_a_parquet_table_becomes_rows_with_metadata(tmp_path, kind, name):
    vectors = 3 * unit(9, dim=5)
    file = table(tmp_path / "rows.parquet", vectors, kind, name, **COLUMNS)
    ((entries, rows),) = read_embeddings(file)
    assert is_embeddings(file) and np.allclose(rows, vectors / 3, atol=1e-6)
    assert [(e.path, e.label, e.data) for e in entries[7:]] == [("7.png", "d", {"price": 7}), ("8.png", "d", {"price": None})]


def test_what_xbm_embed_writes_can_be_indexed(tmp_path):
    file, names = tmp_path / "rows.npz", np.array(["cat", "dog"])
    np.savez(file, embeddings=unit(3), labels=[0, 1, 1], ids=[7, 8, 9], paths=["a", "b", "c"], classes=names, price=[1.5, 2, 3])
    ((entries, _),) = read_embeddings(file)
    assert [(e.path, e.label, e.data) for e in entries] == [
        ("a", "cat", {"price": 1.5}), ("b", "dog", {"price": 2.0}), ("c", "dog", {"price": 3.0}),
    ]  # fmt: skip


HOSTILE_ARRAYS = {
    "a label that is no class": ({"labels": [0, 1, 99], "classes": ["a", "b"]}, "row 2: the label 99 is not the number"),
    "a label below 0": ({"labels": [-1, 0, 0], "classes": ["a", "b"]}, "row 0: the label -1"),
    "labels that are no numbers": ({"labels": ["a", "b", "c"], "classes": ["a"]}, "row 0: the label a"),
    "a class": ({"labels": [0, 0, 0], "classes": "a"}, "not the number of one of the classes"),
    "too few labels": ({"labels": [0, 1]}, r"3 vectors, but labels of shape \(2,\)"),
    "pairs of labels": ({"labels": [[0, 1]] * 3}, r"labels of shape \(3, 2\)"),
    "too few paths": ({"paths": ["a"]}, r"paths of shape \(1,\)"),
    "bytes that are no text": ({"paths": [b"\xff", b"b", b"c"]}, "row 0: .* is not UTF-8"),
    "half a letter": ({"color": ["red", "\ud800", "x"]}, "row 1: .* is not UTF-8"),
    "complex vectors": ({"embeddings": np.eye(3) * 1j}, "vectors of numbers, got complex128"),
    "texts as vectors": ({"embeddings": [["1", "2"]] * 3}, "vectors of numbers"),
    "no vectors": ({"embeddings": np.zeros((3, 0))}, "one vector per row"),
}


@pytest.mark.parametrize("case", HOSTILE_ARRAYS)
def test_arrays_that_do_not_belong_together_are_refused(tmp_path, case):
    arrays, says = HOSTILE_ARRAYS[case]
    np.savez(tmp_path / "rows.npz", **{"embeddings": np.eye(3), **arrays})
    with pytest.raises(InputError, match=says):
        list(read_embeddings(tmp_path / "rows.npz"))


def test_values_of_any_type_are_stored_or_left_out(tmp_path):
    values = {
        "big": pa.array([2**63, 1, None], pa.uint64()), "odd": [float("inf"), float("-inf"), float("nan")],
        "image": [b"\xff\xd8", b"", None], "flag": [True, False, None], "when": [date(2020, 1, 2)] * 3,
        "pair": [{"a": 1}] * 3, "ID": [1, 2, 3], "Label": ["x"] * 3, "a\0b": [1, 2, 3], 'a"b': [1, 2, 3],
    }  # fmt: skip
    file = table(tmp_path / "rows.parquet", unit(3), path=[0, 1, 2], label=[b"a", b"b", None], **values)
    told = []
    update_embeddings(file, tmp_path / "index", None, told.append)
    catalogue = Catalogue(tmp_path / "index")
    items = list(catalogue.items(catalogue.ids().tolist()).values())
    assert [(item.path, item.label) for item in items] == [("0", "a"), ("1", "b"), ("2", "")] and told == []
    assert items[0].data == {"big": 2.0**63, "flag": 1, "when": "2020-01-02"}
    json.dumps([item.data for item in items], allow_nan=False)


def test_columns_that_no_index_can_hold_are_refused(tmp_path):
    many = table(tmp_path / "many.parquet", unit(3), **{f"c{k}": [k] * 3 for k in range(1001)})
    with pytest.raises(InputError, match="keep at most 1,000"):
        list(read_embeddings(many))
    lists = pa.array(unit(3).tolist())
    pq.write_table(pa.table([lists, lists], names=["embedding", "embedding"]), tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="two columns of the same name"):
        list(read_embeddings(tmp_path / "twice.parquet"))


def test_rows_without_names_are_numbered_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("xbm_app.search.embeddings.ROWS", 4)
    np.savez(tmp_path / "rows.npz", vectors=unit(9))
    batches = list(read_embeddings(tmp_path / "rows.npz"))
    assert [len(rows) for _, rows in batches] == [4, 4, 1]
    assert [entry.path for entries, _ in batches for entry in entries] == [str(k) for k in range(9)]


def test_an_exported_index_is_the_table_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr("xbm_app.search.embeddings.ROWS", 4)
    mixed = {"size": [1.5, *range(8)], "code": ["a", None, "7", "b", "8", None, "c", "d", "e"], "nothing": [None] * 9}
    rows = table(tmp_path / "rows.parquet", unit(9, dim=5), **COLUMNS, **mixed)
    command("index", rows, "--out", tmp_path / "index")
    assert command("export", tmp_path / "index", "--out", tmp_path / "new" / "again.parquet").exit_code == 0
    before, after = pq.read_table(rows).to_pydict(), pq.read_table(tmp_path / "new" / "again.parquet").to_pydict()
    np.testing.assert_allclose(after.pop("embedding"), before.pop("embedding"), atol=1e-6)
    assert after == {name: before[name] for name in after} and after.keys() == before.keys()

    command("index", tmp_path / "new" / "again.parquet", "--out", tmp_path / "second")
    assert len(Catalogue(tmp_path / "second")) == 9


def test_boxes_are_exported_as_a_column(tmp_path):
    (tmp_path / "index").mkdir()
    catalogue = Catalogue(tmp_path / "index", write=True)
    catalogue.set("dim", 5)
    with catalogue.change():
        catalogue.add([Entry("a.png", "x", 1, 1, (0, 0, 3, 4)), Entry("a.png", "y", 1, 1)], unit(2, dim=5), [b"", b""])
    assert write_parquet(catalogue, tmp_path / "rows.parquet") == 2
    assert pq.read_table(tmp_path / "rows.parquet").to_pydict()["box"] == ["0,0,3,4", ""]


def test_an_index_is_exported_to_a_parquet_file_only(tmp_path):
    np.savez(tmp_path / "rows.npz", vectors=unit(9))
    command("index", tmp_path / "rows.npz", "--out", tmp_path / "index")
    for words in (("--out", tmp_path / "rows.csv"), ()):
        with pytest.raises(InputError) as refused:
            command("export", tmp_path / "index", *words)
        assert ".parquet" in str(refused.value)


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_indexing_again_follows_the_file(tmp_path):
    vectors, out = unit(9, dim=5), tmp_path / "index"
    assert update_embeddings(table(tmp_path / "a.parquet", vectors, **COLUMNS), out, None, pytest.fail) == Changes(new=9)
    vectors[3] = -vectors[3]
    columns = {name: values[:8] for name, values in {**COLUMNS, "price": [0, 1, 2, 3, 4, 5, 6, 70, 8]}.items()}
    file = table(tmp_path / "a.parquet", vectors[:8], **columns)
    assert update_embeddings(file, out, None, pytest.fail) == Changes(changed=2, removed=1, unchanged=6)
    assert update_embeddings(file, out, None, pytest.fail) == Changes(unchanged=8)
    searcher = Searcher(out)
    best, *others = searcher.search(vectors[3], 8)
    assert best.path == "3.png" and best.similarity == pytest.approx(1) and best.data == {"price": 3} and len(others) == 7
    assert [hit.path for hit in searcher.search(vectors[0], 8, filters_of(["price>6"]))] == ["7.png"]
    with pytest.raises(InputError, match="not of"):
        update_embeddings(table(tmp_path / "b.parquet", vectors, **COLUMNS), out, None, pytest.fail)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda v: v.__setitem__((4, 0), np.nan), "row 4"),
        (lambda v: v.__setitem__(4, 0), "row 4"),
        (lambda v: v.__setitem__((4, 1), np.inf), "row 4"),
    ],
)
def test_unsound_vectors_are_refused_and_named(tmp_path, spoil, says):
    vectors = unit(9)
    spoil(vectors)
    with pytest.raises(InputError, match=says):
        list(read_embeddings(table(tmp_path / "rows.parquet", vectors)))


def test_repeated_paths_other_lengths_and_clashing_columns_are_refused(tmp_path):
    with pytest.raises(InputError, match="two rows with the path a"):
        update_embeddings(table(tmp_path / "a.parquet", unit(2), path=["a", "a"]), tmp_path / "1", None, pytest.fail)
    ragged = pa.array([[1.0, 0.0], [1.0], [1.0, 0.0, 0.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"embedding": ragged}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="length"):
        list(read_embeddings(tmp_path / "b.parquet"))
    with pytest.raises(InputError, match="upper and lower case"):
        list(read_embeddings(table(tmp_path / "c.parquet", unit(2), Price=[1, 2], price=[1, 2])))
    np.savez(tmp_path / "d.npz", x=np.eye(3))
    with pytest.raises(InputError, match="rename"):
        list(read_embeddings(tmp_path / "d.npz"))
    (tmp_path / "e.npz").write_bytes(b"PK\3\4 not an archive")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_embeddings(tmp_path / "e.npz"))


def test_the_commands_take_embeddings_encoders_texts_and_filters(own_encoder, colors, tmp_path, monkeypatch):
    def run(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    index, encoder = tmp_path / "index", f"{own_encoder}:Encoder"
    assert "4 embedded" in run("index", colors, "--encoder", encoder, "--out", index)
    words = ("search", index, "--encoder", encoder, "--text", "red", "--json", "--filter", "price>0")
    (answer,) = json.loads(run(*words))
    assert answer["query"] == "red" and answer["results"][0]["price"] == 10
    page = tmp_path / "page.html"
    assert "price" in run("search", index, "--encoder", encoder, "--text", "red", "--sheet", page) and page.exists()
    with pytest.raises(InputError, match="meets price>99"):
        run("search", index, "--encoder", encoder, "--text", "red", "--filter", "price>99")
    rows = table(tmp_path / "rows.parquet", unit(4), path=[f"photos/{k}.png" for k in range(4)])
    assert "4 embedded" in run("index", rows, tmp_path, "--out", tmp_path / "other")
    assert all(Catalogue(tmp_path / "other").thumbnail(image) for image in (1, 2, 3, 4))
    for words, says in (
        (("index", rows), "--out"), (("index", tmp_path), "pass the images"), (("search", index), "nothing to search for"),
        (("search", tmp_path / "other", tmp_path / "photos/0.png"), None),
    ):  # fmt: skip
        if says is None:
            assert "contains no model" in str(CliRunner().invoke(app, [str(word) for word in words]).exception)
        else:
            with pytest.raises(InputError, match=says):
                run(*words)


def test_an_exported_index_is_searched_by_the_recipe_of_the_docs(tmp_path, monkeypatch):
    """That of faiss; Qdrant and LanceDB are not among the packages of the tests."""
    page = (Path(__file__).parents[3] / "docs" / "search.md").read_text()
    recipe = page[page.index("    import faiss\n") : page.index("    from qdrant_client")]
    assert "upload_collection" in page and "create_table" in page
    catalogue, rows = Catalogue(tmp_path, write=True), np.eye(5, dtype=np.float32)
    catalogue.set("dim", 5)
    with catalogue.change():
        catalogue.add([Entry(f"{k}.png", "", 1, 1) for k in range(5)], rows, [b""] * 5)
    write_parquet(catalogue, tmp_path / "rows.parquet")
    catalogue.close()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(textwrap.dedent(recipe), names)
    assert names["index"].search(rows, 1)[1][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert names["table"]["path"].to_pylist() == [f"{k}.png" for k in range(5)]


@pytest.mark.usefixtures("no_waiting")
def test_thumbnails_show_images_as_they_are_embedded_and_wait_for_no_pipe(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    Image.new("RGB", (80, 40), "blue").save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(np.full((9, 9), 30_000, np.uint16)).save(tmp_path / "gray.png")
    os.mkfifo(tmp_path / "pipe.png")
    names, notes = ["turned.jpg", "gray.png", "pipe.png"], []
    file = table(tmp_path / "rows.parquet", unit(3, dim=5), path=names)
    update_embeddings(file, tmp_path / "index", tmp_path, lambda error: notes.append(str(error)))
    with closing(Catalogue(tmp_path / "index")) as catalogue:
        pictures = [catalogue.thumbnail(catalogue.find((name, ""))) for name in names]
    shown = [Image.open(io.BytesIO(picture)) for picture in pictures[:2]]
    assert shown[0].size == (40, 80) and abs(np.asarray(shown[1]).mean() - 30_000 / 257) < 3 and pictures[2] is None
    assert ["pipe.png cannot be read" in note for note in notes] == [True]
