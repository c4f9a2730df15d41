import os
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from xbm.errors import DamagedFileError, InputError
from xbm_app.files import CHECKSUMS, read_json, record_checksum
from xbm_app.search.catalogue import FILE, Catalogue, Entry, Item, Known
from xbm_app.search.filters import filters_of


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
    assert len(again) == 3 and again.ids().tolist() == [1, 2, 3] and again.ids(filters_of([], "b")).tolist() == [2]
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


# ------------------------------------------------------------------ snapshots


def fill(catalogue, labels, rows=40):
    entries = [Entry(f"{number}.png", label, 1, 1) for label in labels for number in range(rows)]
    with catalogue.change():
        catalogue.add(entries, np.ones((len(entries), 3), np.float32), [b"x" * 5000] * len(entries))


@pytest.fixture
def written(tmp_path):
    with closing(Catalogue(tmp_path, write=True)) as catalogue:
        catalogue.set("dim", 3)
        fill(catalogue, ["old"])
        yield catalogue


def held(folder):
    catalogue = Catalogue(folder)
    catalogue.hold()
    return catalogue


def test_a_held_catalogue_stays_as_it_was_and_stands_in_nobodys_way(written, tmp_path):
    with closing(held(tmp_path)) as reader:
        before = reader.ids()
        fill(written, ["new"])
        written.remove([])
        assert reader.labels() == [("old", 40)] and written.labels() == [("new", 40)]
        assert reader.ids().tolist() == before.tolist() and reader.vectors(before).any(axis=1).all()
        assert reader.thumbnail(int(before[0])) == b"x" * 5000


def test_it_is_replaced_once_an_update_is_complete_and_only_then(written, tmp_path):
    with closing(held(tmp_path)) as reader:
        assert not reader.replaced()
        fill(written, ["new"])
        assert not written.complete and not reader.replaced()
        written.publish()
        assert written.complete and reader.replaced()
        fill(written, ["newer"])  # the next update has begun
        assert not reader.replaced()
    with written.change():
        pass
    written.publish()
    with closing(held(tmp_path)) as reader:
        with written.change():
            written.remove([])
        written.publish()
        assert not reader.replaced()  # nothing has changed


def test_looking_for_an_update_does_not_read_the_whole_file(written, tmp_path, monkeypatch):
    written.publish()
    with closing(held(tmp_path)) as reader:
        written.seal()
        monkeypatch.setattr("xbm_app.search.catalogue.verify", lambda *_, **__: pytest.fail("read"))
        assert not reader.replaced()
    (tmp_path / FILE).unlink()
    with closing(written), pytest.raises(FileNotFoundError):
        reader.replaced()
    assert not (tmp_path / FILE).exists()


def test_the_log_does_not_grow_with_every_update_while_somebody_reads(written, tmp_path):
    written.publish()
    sizes, reader = [], held(tmp_path)
    for _ in range(6):
        fill(written, ["new"])
        written.publish()
        before, reader = reader, held(tmp_path)
        before.close()
        reader.settle()
        assert reader.labels() == [("new", 40)]
        sizes.append((tmp_path / f"{FILE}-wal").stat().st_size)
    reader.close()
    assert sizes[-1] < 1.5 * sizes[1]


def test_a_catalogue_is_not_settled_into_an_update(written, tmp_path):
    with closing(held(tmp_path)) as reader:
        fill(written, ["new"])
        reader.settle()
        assert reader.labels() == [("old", 40)]
        with written.change():
            reader.settle()  # neither waits nor fails while somebody writes
        assert reader.labels() == [("old", 40)]


def test_a_file_with_a_checksum_is_verified_whatever_log_lies_beside_it(written, tmp_path):
    written.seal()
    written.close()
    (tmp_path / f"{FILE}-wal").write_bytes(b"not empty")
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(-7, os.SEEK_END)
        file.write(b"damaged")
    with pytest.raises(DamagedFileError):
        Catalogue(tmp_path)


def test_a_file_that_is_being_changed_is_read_with_one_warning(written, tmp_path):
    with written.change():
        written.discard(("0.png", ""))
    with pytest.warns(UserWarning, match="not ended"):
        Catalogue(tmp_path).close()


def test_a_file_that_is_settled_before_an_update_changes_it_loses_its_checksum_then(written, tmp_path):
    """Settling may come between the moment when an update opens the file and its first change."""
    writer = Catalogue(tmp_path, write=True)
    record_checksum(tmp_path / FILE)
    writer.set("dim", 3)
    assert FILE not in read_json(tmp_path / CHECKSUMS)
    writer.seal()
    assert FILE in read_json(tmp_path / CHECKSUMS)
    with writer.change():
        writer.discard(("0.png", ""))
    assert FILE not in read_json(tmp_path / CHECKSUMS)
    writer.close()


def test_a_catalogue_of_an_older_version_can_be_held(written, tmp_path):
    written._database.execute("PRAGMA journal_mode = DELETE")
    with closing(held(tmp_path)) as reader:
        fill(written, ["new"])
        assert reader.labels() == [("old", 40)]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX only")
def test_an_index_can_be_read_where_nothing_can_be_written(written, tmp_path, monkeypatch):
    written.close()
    monkeypatch.setattr("xbm_app.search.catalogue.os.access", lambda *_: False)
    connect = sqlite3.connect

    def refusing(file, *args, **options):  # as a read-only file system does, for root too
        if not options.get("uri"):
            return Refusing()
        return connect(file, *args, **options)

    class Refusing:
        def execute(self, *_):
            raise sqlite3.OperationalError("unable to open database file")

        def close(self):
            pass

    monkeypatch.setattr("xbm_app.search.catalogue.sqlite3.connect", refusing)
    with closing(held(tmp_path)) as reader:
        assert reader.labels() == [("old", 40)] and not reader.replaced()
        reader.settle()
