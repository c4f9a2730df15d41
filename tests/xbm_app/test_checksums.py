"""Files with a checksum: damage is noticed, files of older versions load with one warning, a kill never looks like damage."""

import json
import os
import warnings

import pytest

from xbm.errors import DamagedFileError
from xbm_app import files
from xbm_app.files import CHECKSUMS, forget_checksum, read_json, record_checksum, replacing, verify, write_bytes, write_json


@pytest.mark.parametrize("damaged", [b"al1 of it", b"all of i", b"all of it.", b""])
def test_a_changed_file_is_refused(tmp_path, damaged):
    path = tmp_path / "notes.txt"
    write_bytes(path, b"all of it", checksum=True)
    assert verify(path) == path
    path.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match=r"notes\.txt is not as xbm wrote it") as error:
        verify(path)
    assert error.value.path == path


def test_a_file_that_does_not_exist_is_left_to_its_reader(tmp_path):
    write_bytes(tmp_path / "notes.txt", b"all of it", checksum=True)
    (tmp_path / "notes.txt").unlink()
    assert not verify(tmp_path / "notes.txt").exists()


def test_a_folder_of_an_older_version_is_read_with_one_warning(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    write_json(tmp_path / "b.json", {"b": 2})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert read_json(tmp_path / "a.json") == {"a": 1} and read_json(tmp_path / "b.json") == {"b": 2}
    assert len(told) == 1 and str(tmp_path) in str(told[0].message)


def test_a_folder_without_its_list_is_taken_as_it_is(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1}, checksum=True)
    (tmp_path / "a.json").write_text('{"a": 2}')  # by a person, on purpose
    (tmp_path / CHECKSUMS).unlink()
    with pytest.warns(UserWarning, match="not verified"):
        assert read_json(tmp_path / "a.json") == {"a": 2}


@pytest.mark.parametrize("listed", ["", "{", "[]", '{"a.json": 3}', '{"a.json": ["x"]}', "[" * 100_000, "\0"])
def test_a_damaged_list_is_one_sentence(tmp_path, listed):
    write_json(tmp_path / "a.json", {}, checksum=True)
    (tmp_path / CHECKSUMS).write_text(listed)
    with pytest.raises(DamagedFileError, match="delete it to use the files"):
        verify(tmp_path / "a.json")
    write_json(tmp_path / "a.json", {"a": 1}, checksum=True)  # writing replaces it
    assert read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("older", [True, False])
def test_a_kill_at_any_moment_leaves_a_file_that_passes(tmp_path, monkeypatch, older):
    path, moments, write = tmp_path / "a.json", [], os.replace
    write_json(path, {"a": 1}, checksum=not older)

    def look(source, target):
        write(source, target)
        moments.append(json.loads(verify(path).read_bytes())["a"])

    monkeypatch.setattr(files.os, "replace", look)
    write_json(path, {"a": 2}, checksum=True)
    write_json(path, {"a": 3}, checksum=True)
    assert moments == [1, 2, 2, 3]


def test_a_file_that_is_replaced_while_it_is_read_passes(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1}, checksum=True)
    honest, pending = files._checksum, [{"a": 2}, {"a": 3}]

    def slow(*given):
        monkeypatch.setattr(files, "_checksum", honest)
        for value in pending:
            write_json(path, value, checksum=True)
        return honest(*given)

    monkeypatch.setattr(files, "_checksum", slow)
    assert read_json(path) == {"a": 3}


def test_rows_may_be_appended_to_a_growing_file_but_not_changed(tmp_path):
    path = tmp_path / "metrics.csv"
    write_bytes(path, b"1,2\n", checksum=True)
    with path.open("ab") as file:
        file.write(b"3,4\n")
    verify(path, growing=True)
    with pytest.raises(DamagedFileError):
        verify(path)
    record_checksum(path)
    verify(path)
    path.write_bytes(b"1,2\n3,5\n")
    with pytest.raises(DamagedFileError):
        verify(path, growing=True)


def test_a_file_that_is_changed_in_place_has_no_checksum_meanwhile(tmp_path):
    path = tmp_path / "index.sqlite"
    write_bytes(path, b"rows", checksum=True)
    write_bytes(tmp_path / "other", b"rows", checksum=True)
    forget_checksum(path)
    path.write_bytes(b"more rows")
    with pytest.warns(UserWarning, match="without checksums"):
        verify(path)
    record_checksum(path)
    path.write_bytes(b"less rows")
    with pytest.raises(DamagedFileError):
        verify(path)


def test_a_planted_link_is_not_followed(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("keep me")
    out = tmp_path / "out"
    out.mkdir()
    os.symlink(mine, out / "a.part.json")
    os.link(mine, out / "b.part.json")
    write_json(out / "a.json", {})
    write_json(out / "b.json", {})
    assert mine.read_text() == "keep me" and sorted(os.listdir(out)) == ["a.json", "b.json"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as temporary:
            temporary.write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
