import sqlite3

import numpy as np
import pytest

from xbm.errors import InputError
from xbm_app.search.catalogue import FILE, Catalogue, Entry, Item, Known


def entry(path, label="a", size=1, time=1, box=None):
    return Entry(path, label, size, time, box)


@pytest.fixture
def catalogue(tmp_path):
    made = Catalogue(tmp_path, write=True)
    made.set("dim", 3)
    with made.change():
        made.add([entry("x.png"), entry("y.png", "b"), entry("z.png", "")], np.eye(3), [b"X", b"Y", b""])
    yield made
    made.close()


def test_what_was_written_is_there_when_it_is_opened_again(catalogue, tmp_path):
    catalogue.close()
    again = Catalogue(tmp_path)
    assert len(again) == 3 and again.ids().tolist() == [1, 2, 3] and again.ids("b").tolist() == [2]
    assert again.known()["y.png", ""] == Known(2, "b", 1, 1)
    assert np.array_equal(again.vectors(np.array([3, 1])), [[0, 0, 1], [1, 0, 0]])
    assert again.items([2, 9]) == {2: Item(2, "y.png", "b")}
    assert (again.thumbnail(1), again.thumbnail(3), again.thumbnail(9)) == (b"X", None, None)
    assert again.labels() == [("a", 1), ("b", 1)]
    assert again.key_of(2) == ("y.png", "") and again.find(("y.png", "")) == 2
    assert again.key_of(9) is None and again.find(("y.png", "1,2,3,4")) is None


def test_an_image_embedded_anew_replaces_itself_under_a_new_id(catalogue):
    with catalogue.change():
        catalogue.add([entry("z.png", "c", 7, 8)], np.array([[0.6, 0.8, 0]]), [b"Z"])
    assert catalogue.ids().tolist() == [1, 2, 4] and catalogue.known()["z.png", ""] == Known(4, "c", 7, 8)


def test_no_id_is_ever_used_twice(catalogue):
    with catalogue.change():
        catalogue.remove([1, 2, 3])
    with catalogue.change():
        catalogue.add([entry("x.png")], np.eye(3)[:1], [b"x"])
    assert catalogue.ids().tolist() == [4] and catalogue.thumbnail(1) is None


def test_a_change_that_fails_leaves_everything_as_it_was(catalogue):
    def fail():
        with catalogue.change():
            catalogue.remove([1])
            catalogue.relabel([(2, "other")])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(catalogue) == 3 and catalogue.thumbnail(1) == b"X" and catalogue.items([2])[2].label == "b"


def test_what_is_unwritten_at_a_kill_is_not_there(catalogue, tmp_path):
    """Another process sees a change only once it is whole."""
    with catalogue.change():
        catalogue.add([entry("new.png")], np.eye(3)[:1], [b""])
        other = sqlite3.connect(tmp_path / FILE)
        assert other.execute("SELECT count(*) FROM images").fetchone() == (3,)
        other.close()
    assert len(catalogue) == 4


def test_many_ids_are_asked_for_in_pieces(catalogue, monkeypatch):
    monkeypatch.setattr("xbm_app.search.catalogue.IDS_PER_QUERY", 2)
    assert np.array_equal(catalogue.vectors(np.array([2, 3, 1, 2])), np.eye(3)[[1, 2, 0, 1]])
    assert np.array_equal(catalogue.vectors(np.array([9, 1])), [[0, 0, 0], [1, 0, 0]])


def test_a_folder_that_is_no_index_says_so(tmp_path):
    with pytest.raises(InputError, match="is not an index: make one with `xbm index"):
        Catalogue(tmp_path)
    (tmp_path / FILE).touch()
    with pytest.raises(InputError, match="without any content"):
        Catalogue(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="cannot be read"):
        Catalogue(tmp_path)


def test_an_index_of_another_format_is_refused(catalogue, tmp_path):
    catalogue.set("format", 99)
    with pytest.raises(InputError, match="format 99"):
        Catalogue(tmp_path)


def test_a_full_disk_is_one_sentence_and_harms_nothing(catalogue):
    catalogue._rows("PRAGMA max_page_count = 12")
    many = [entry(f"{k}.png") for k in range(500)]

    def fill():
        with catalogue.change():
            catalogue.add(many, np.ones((500, 3)), [bytes(1000)] * 500)

    with pytest.raises(InputError, match=r"full.*the index is unchanged: free some space"):
        fill()
    assert len(catalogue) == 3
    catalogue._rows("PRAGMA max_page_count = 100000")
    fill()
    assert len(catalogue) == 503
