import errno
import os

import pytest

from xbm.errors import InputError
from xbm_app.train.files import disk_trouble_told, replacing


def test_the_new_file_appears_whole(tmp_path):
    target = tmp_path / "figures.json"
    target.write_text("old")
    with replacing(target) as beside:
        beside.write_text("new")
        assert target.read_text() == "old" and beside.parent == tmp_path and beside.suffix == ".json"
    assert target.read_text() == "new" and os.listdir(tmp_path) == ["figures.json"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_the_old_file_stays_when_anything_fails(tmp_path, monkeypatch, step):
    target = tmp_path / "figures.json"
    target.write_text("old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if step != "write":
        monkeypatch.setattr(os, step, full)

    def replace() -> None:
        with replacing(target) as beside:
            beside.write_text("new")
            if step == "write":
                full()

    with pytest.raises(OSError):
        replace()
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["figures.json"]


def test_it_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("sync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("rename") or rename(*paths))
    with replacing(tmp_path / "a.txt") as beside:
        beside.write_text("new")
    assert done == ["sync", "rename", "sync"]  # the file, then the folder that names it


def test_what_the_disk_says_becomes_one_sentence(tmp_path):
    with (
        pytest.raises(InputError, match=r"not write /x/y \(No space left on device\); no checkpoint") as error,
        disk_trouble_told(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/x/y")
    assert "\n" not in str(error.value)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    with pytest.raises(InputError, match=rf"could not write {tmp_path} .*unharmed"), disk_trouble_told(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")
