"""The same index in Milvus: an embedded engine, in a process of its own that can be ended and started again."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from tests.xbm_app.search.test_filters import VALUES
from tests.xbm_app.search.test_neighbours import unit
from xbm.errors import InputError
from xbm_app.search.catalogue import Entry, Item, Known
from xbm_app.search.filters import OPERATORS, Filter, filters_of, matches
from xbm_app.search.milvus import MilvusCatalogue, UnavailableError
from xbm_app.search.neighbours import build, recall
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import Changes, update


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return f"milvus:{tmp_path_factory.mktemp('engine') / 'index.db'}"


@pytest.fixture
def catalogue(where, request):
    made = MilvusCatalogue(f"{where}#{request.node.name.partition('[')[0]}", write=True)
    made.set("dim", 3)
    entries = [
        Entry("x.png", "a", 1, 1, data={"price": 5}),
        Entry("y.png", "b", 1, 1, (0, 0, 2, 2)),
        Entry('z".png', "", 1, 2**60),
    ]
    made.add(entries, np.eye(3), [b"X" * 70_000, b"Y", b""])
    yield made
    made.close()


def test_it_answers_as_the_embedded_index_does(catalogue):
    known = catalogue.known()
    x, y, z = known["x.png", ""], known["y.png", "0,0,2,2"], known['z".png', ""]
    assert len(catalogue) == 3 and catalogue.ids().tolist() == sorted([x.id, y.id, z.id]) and z == Known(z.id, "", 1, 2**60)
    assert np.array_equal(catalogue.vectors(np.array([z.id, x.id, 7])), [[0, 0, 1], [1, 0, 0], [0, 0, 0]])
    assert catalogue.items([x.id, 7]) == {x.id: Item(x.id, "x.png", "a", {"price": 5})}
    assert [catalogue.thumbnail(each) for each in (x.id, y.id, z.id, 7)] == [None, b"Y", None, None]
    assert catalogue.labels() == [("a", 1), ("b", 1)] and catalogue.columns() == ["price"]
    assert catalogue.key_of(y.id) == ("y.png", "0,0,2,2") and catalogue.find(('z".png', "")) == z.id
    assert catalogue.key_of(7) is None and catalogue.find(("y.png", "")) is None
    assert catalogue.get("nothing", 3) == 3 and catalogue.count(filters_of(["price<9"])) == 1
    assert len(catalogue.some_ids(())) == 3


def test_the_few_rows_that_meet_a_filter_are_all_compared(catalogue, monkeypatch):
    entries = [Entry(f"{number}.png", "many", 1, 1, data={"price": number}) for number in range(40)]
    rows = np.eye(3)[np.arange(40) % 3] + 0.1 * np.random.default_rng(0).standard_normal((40, 3))
    catalogue.add(entries, rows / np.linalg.norm(rows, axis=1, keepdims=True), [b""] * 40)
    chosen, vector = filters_of(["label=many", "price>=10"]), np.array([0.6, 0.8, 0.0])
    engine = catalogue._client

    def search(*_, **__):
        pytest.fail("the engine's approximate search may miss all of them")

    expected = [(item.path, value) for item, value in catalogue.search(vector, 5, filters_of(["price>=10"]))]
    monkeypatch.setattr(engine, "search", search)
    few = [(item.path, value) for item, value in catalogue.search(vector, 5, chosen)]
    monkeypatch.undo()
    monkeypatch.setattr("xbm_app.search.milvus.FEW", 29)
    found = [(item.path, value) for item, value in catalogue.search(vector, 5, chosen)]
    assert [path for path, _ in few] == [path for path, _ in found] == [path for path, _ in expected] and len(few) == 5
    assert np.allclose([value for _, value in few], [value for _, value in found], atol=1e-5)


def test_recall_is_not_measured_against_a_part_of_the_rows(catalogue, monkeypatch):
    """The true neighbors among some of the rows are not those among all of them."""
    assert recall(build(catalogue), catalogue) == 1.0
    monkeypatch.setattr("xbm_app.search.milvus.PAGE", 2)
    assert recall(build(catalogue), catalogue) is None


def test_rows_are_replaced_relabelled_described_and_removed(catalogue):
    catalogue.add([Entry("x.png", "c", 7, 8, data={"color": "red"})], np.array([[0, 0.6, 0.8]]), [b"Z"])
    old = catalogue.known()
    assert len(catalogue) == 3 and old["x.png", ""].label == "c" and catalogue.columns() == ["price", "color"]
    catalogue.relabel([(old["y.png", "0,0,2,2"].id, "new")])
    (y,) = catalogue.ids(filters_of([], "new")).tolist()
    assert catalogue.thumbnail(y) == b"Y" and catalogue.vectors(np.array([y])).tolist() == [[0, 1, 0]]
    catalogue.describe([(y, {"price": 1.5}), (catalogue.find(("x.png", "")), {"color": "red"})])
    assert catalogue.items(catalogue.ids(filters_of(["price=1.5"])).tolist()).popitem()[1].path == "y.png"
    catalogue.discard(("x.png", ""))
    assert len(catalogue) == 2 and catalogue.find(("x.png", "")) is None


def test_the_model_comes_back_whole(catalogue):
    content = np.random.default_rng(0).bytes(7_300_003)
    catalogue.keep_model("one", lambda file: file.write_bytes(content))
    with catalogue.model_file("one") as file:
        assert file.read_bytes() == content
    catalogue.keep_model("two", lambda file: file.write_bytes(content[:100]))
    with catalogue.model_file("two") as file:
        assert file.read_bytes() == content[:100]


def test_the_nearest_are_those_of_exact_search_and_filters_those_of_plain_python(where):
    catalogue, rows = MilvusCatalogue(f"{where}#many", write=True), unit(900)
    catalogue.set("dim", 12)
    data = [{"price": a, "Größe in cm": b} for a in VALUES for b in (1, "x", None)]
    data = [data[k % len(data)] for k in range(900)]
    catalogue.add([Entry(f"{k}", f"label {k % 3}", 1, 1, data=data[k]) for k in range(900)], rows, [b""] * 900)
    query = unit(1, seed=5)[0]
    for text in ([], ["price>=0"], ["price>=0", "Größe in cm=1"]):
        filters = filters_of(text)
        allowed = [k for k in range(900) if all(matches(each, data[k]) for each in filters)]
        best = sorted(allowed, key=lambda k: -float(rows[k] @ query))[:10]
        found = catalogue.search(query, 10, filters)
        assert len({item.path for item, _ in found} & set(map(str, best))) >= 9 and found[0][1] == pytest.approx(
            rows[best[0]] @ query, abs=1e-5
        )
    paths = {int(image): int(item.path) for image, item in catalogue.items(catalogue.ids().tolist()).items()}
    for operator in OPERATORS:
        for value in VALUES:
            each = Filter("price", operator, value)
            expected = {k for k in range(900) if matches(each, data[k])}
            assert {paths[image] for image in catalogue.ids([each]).tolist()} == expected, each
    with pytest.raises(InputError, match="did you mean 'price'"):
        catalogue.ids(filters_of(["prize=3"]))


@pytest.mark.parametrize(
    ("name", "says"), [("milvus:", "names no engine"), ("milvus:a.db#b c", "names no"), ("milvus:no.db", "does not exist")]
)
def test_bad_addresses_are_refused(name, says):
    with pytest.raises(InputError, match=says):
        MilvusCatalogue(name)


@pytest.fixture
def engine(tmp_path):
    """The address of an engine in a process of its own, and what starts and ends it."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []

    def start():
        words = ("server", "--data-dir", str(tmp_path / "data"), "--host", "127.0.0.1", "--port", str(port))
        words = (sys.executable, "-m", "milvus_lite", *words)
        running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)

    def end():
        running[-1].kill()
        running.pop().wait()

    start()
    yield f"milvus:http://127.0.0.1:{port}", start, end
    if running:
        end()


def test_a_lost_engine_is_one_sentence_and_a_returned_one_is_used_again(engine, monkeypatch):
    where, start, end = engine
    monkeypatch.setattr("xbm_app.search.milvus.SECONDS", 2)
    catalogue = MilvusCatalogue(where, write=True)
    catalogue.set("dim", 3)
    catalogue.add([Entry("x.png", "a", 1, 1)], np.eye(3)[:1], [b""])
    end()
    for call in (lambda: len(catalogue), lambda: catalogue.search(np.eye(3)[0], 1), lambda: catalogue.ids()):
        with pytest.raises(UnavailableError, match="does not answer"):
            call()
    start()
    for _ in range(40):
        with suppress(UnavailableError):
            assert catalogue.search(np.eye(3)[0], 1)[0][0].path == "x.png"
            break
        time.sleep(0.5)
    else:
        pytest.fail("the engine is back, and is not used")


def test_a_run_is_indexed_updated_and_searched_as_in_a_folder(searchable, photos, tmp_path):
    where, told = f"milvus:{tmp_path / 'index.db'}", []
    assert update(searchable, photos, where, told.append, quiet=True) == Changes(new=72)
    (photos / "class_03" / "1.png").unlink()
    shutil.copy(photos / "class_03" / "2.png", photos / "class_03" / "new.png")
    assert update(searchable, photos, where, told.append, quiet=True) == Changes(new=1, removed=1, unchanged=71)
    update(searchable, photos, tmp_path / "folder", told.append, quiet=True)
    remote, local = Searcher(where), Searcher(tmp_path / "folder")
    image = remote.open(photos / "class_05" / "0.png")
    for conditions in ((), filters_of([], "class_05")):
        there, here = (s.search(s.embed(image), 5, conditions) for s in (remote, local))
        assert [hit.path for hit in there] == [hit.path for hit in here]
        assert [hit.similarity for hit in there] == pytest.approx([hit.similarity for hit in here], abs=1e-5)
    assert remote.like(there[0].id, 3)[0].path == local.like(here[0].id, 3)[0].path and told == []
