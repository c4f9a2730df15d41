import subprocess
import sys

import numpy as np
import pytest

from xbm_app.search import neighbours as module
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.neighbours import FILE, build, open_neighbours, recall

DIM = 12


def unit(count, seed=0, dim=DIM):
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def add(catalogue, rows, prefix="x"):
    entries = [Entry(f"{prefix}{k}.png", f"label {k % 7}", 1, 1) for k in range(len(rows))]
    with catalogue.change():
        catalogue.add(entries, rows, [b""] * len(rows))


@pytest.fixture
def catalogue(tmp_path):
    made = Catalogue(tmp_path, write=True)
    made.set("dim", DIM)
    add(made, unit(2003))
    yield made
    made.close()


@pytest.fixture
def small_limit(monkeypatch):
    """Everything but a handful of rows is compressed."""
    monkeypatch.setattr(module, "EXACT_BYTES", 4 * DIM * 20)
    monkeypatch.setattr(module, "CHUNK", 301)


def by_hand(catalogue, queries, k, ids=None):
    ids = catalogue.ids() if ids is None else ids
    similarity = queries @ catalogue.vectors(ids).T
    order = np.argsort(-similarity, axis=1)[:, :k]
    return np.take_along_axis(similarity, order, 1), ids[order]


def test_a_small_index_is_exact(catalogue):
    found = build(catalogue)
    similarity, ids = found.search(unit(5, seed=1), 9)
    wanted = by_hand(catalogue, unit(5, seed=1), 9)
    assert found.kind == "exact" and found.bytes == 4 * DIM * 2003 and recall(found, catalogue) == 1
    assert np.array_equal(ids, wanted[1]) and np.allclose(similarity, wanted[0], atol=1e-6)
    assert not (catalogue.folder / FILE).exists()


def test_a_large_one_is_compressed_and_nearly_as_good(catalogue, small_limit):
    found = build(catalogue)
    assert found.kind == "compressed" and found.bytes < 4 * DIM * 2003 and (catalogue.folder / FILE).exists()
    similarity, ids = found.search(unit(50, seed=1), 10)
    wanted = by_hand(catalogue, unit(50, seed=1), 10)
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, wanted[1])])
    assert share > 0.95 and np.allclose(similarity[:, 0], wanted[0][:, 0], atol=2e-3)
    assert (np.diff(similarity, axis=1) <= 0).all()
    assert recall(found, catalogue) > 0.95


def test_the_recall_is_measured_not_assumed(catalogue, small_limit, monkeypatch):
    found = build(catalogue)
    honest = found.search
    monkeypatch.setattr(found, "search", lambda queries, k: tuple(np.roll(each, 5, axis=0) for each in honest(queries, k)))
    assert recall(found, catalogue) < 0.2


@pytest.mark.parametrize("compressed", [False, True])
def test_among_some_ids_only_those_are_found(catalogue, compressed, request):
    if compressed:
        request.getfixturevalue("small_limit")
    found = build(catalogue)
    few = np.array([7, 900, 2000])
    similarity, ids = found.search(unit(4, seed=2), 5, few)
    wanted = by_hand(catalogue, unit(4, seed=2), 3, few)
    assert np.array_equal(ids[:, :3], wanted[1]) and np.allclose(similarity[:, :3], wanted[0], atol=1e-6)
    assert (ids[:, 3:] == -1).all() and np.isneginf(similarity[:, 3:]).all()
    assert (found.search(unit(1), 2, np.empty(0, np.int64))[1] == -1).all()


def test_more_neighbours_than_images_leaves_places_empty(catalogue):
    found = build(catalogue)
    similarity, ids = found.search(unit(2, seed=3), 2010)
    assert (ids[:, :2003] > 0).all() and (ids[:, 2003:] == -1).all() and np.isneginf(similarity[:, 2003:]).all()


def test_codes_follow_what_is_added_and_removed_without_being_learnt_again(catalogue, small_limit, monkeypatch):
    build(catalogue)
    monkeypatch.setattr(module, "_trained", lambda *_: pytest.fail("learnt again"))
    add(catalogue, unit(50, seed=4), prefix="new")
    gone = catalogue.ids()[::13]
    with catalogue.change():
        catalogue.remove(gone.tolist())
    found = open_neighbours(catalogue)
    queries = catalogue.vectors(catalogue.ids()[-50:])
    _, ids = found.search(queries, 10)
    assert np.array_equal(ids[:, 0], catalogue.ids()[-50:])  # each new one finds itself first
    assert not np.isin(ids, gone).any() and (ids >= 0).all() and np.array_equal(found.ids, catalogue.ids())


def test_many_removed_codes_are_written_anew(catalogue, small_limit):
    build(catalogue)
    with catalogue.change():
        catalogue.remove(catalogue.ids()[:1000].tolist())
    before = (catalogue.folder / FILE).stat().st_size
    found = build(catalogue)
    assert (catalogue.folder / FILE).stat().st_size < 0.6 * before
    assert np.array_equal(found.search(catalogue.vectors(catalogue.ids()[:9]), 1)[1][:, 0], catalogue.ids()[:9])


def test_few_results_among_many_removed_ones_are_still_found(catalogue, small_limit, monkeypatch):
    """All that lies near the query is gone: the search goes on until it has enough."""
    build(catalogue)
    query = unit(1, seed=5)
    gone = by_hand(catalogue, query, 300)[1][0]
    with catalogue.change():
        catalogue.remove(gone.tolist())
    found = open_neighbours(catalogue)
    _, ids = found.search(query, 10)
    assert (ids >= 0).all() and not np.isin(ids, gone).any()
    assert len(set(ids[0]) & set(by_hand(catalogue, query, 10)[1][0])) >= 9


@pytest.mark.parametrize("content", [b"no index", b""])
def test_codes_that_cannot_be_read_are_made_again(catalogue, small_limit, content):
    build(catalogue)
    (catalogue.folder / FILE).write_bytes(content)
    assert recall(build(catalogue), catalogue) > 0.95


def test_an_index_that_has_grown_is_learnt_again(catalogue, small_limit):
    build(catalogue)
    assert catalogue.get("learnt_at") == 2003
    catalogue.set("learnt_at", 400)
    build(catalogue)
    assert catalogue.get("learnt_at") == 2003


def test_odd_dimensions_can_be_compressed_too(tmp_path, small_limit):
    catalogue = Catalogue(tmp_path, write=True)
    catalogue.set("dim", 7)
    add(catalogue, unit(500, dim=7))
    assert recall(build(catalogue), catalogue) > 0.95


@pytest.mark.slow
def test_another_librarys_changes_to_faiss_do_no_harm():
    """pytorch-metric-learning loads an extension that replaces the search of every index."""
    check = (
        "import faiss, faiss.contrib.torch_utils, numpy as np; from xbm_app.search.neighbours import Exact;"
        "rows = np.eye(3, 4, dtype=np.float32); found = Exact(np.array([5, 6, 7]), rows).search(rows[1:], 2, np.array([6, 7]));"
        "assert found[1].tolist() == [[6, 7], [7, 6]], found"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
