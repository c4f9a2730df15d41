import builtins
import errno
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from xbm.errors import DamagedFileError, InputError
from xbm_app import files
from xbm_app.files import FORMAT, explain_disk_errors, locked, read_checkpoint, replacing, write_bytes, write_checkpoint


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


def test_one_process_at_a_time_holds_the_lock_of_a_folder(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InputError, match="is being trained by another process"), locked(tmp_path):
            pass
        with locked(tmp_path, writes=False):  # a rank that writes nothing
            pass
    with locked(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_the_folder_that_another_has_just_created(tmp_path):
    folder = tmp_path / "run"
    with locked(folder):  # nothing is written yet, as long as the data is being read
        for _ in range(2):  # the second one found no folder, and had a lock of its own
            with pytest.raises(InputError, match="is being trained by another process"), locked(folder):
                pass
            assert folder.exists()
    assert not folder.exists()


def test_a_folder_that_its_holder_removes_before_it_is_locked_is_created_anew(tmp_path, monkeypatch):
    folder, honest, removed = tmp_path / "run", files.lock, []

    def late(descriptor):
        if not removed:
            removed.append(folder.rmdir())
        return honest(descriptor)

    monkeypatch.setattr(files, "lock", late)
    with locked(folder):
        assert removed and folder.exists()
        with pytest.raises(InputError, match="is being trained by another process"), locked(folder):
            pass


def test_windows_locks_a_file_and_syncs_no_folder(tmp_path, monkeypatch):
    """As on Windows: no fcntl, a folder cannot be opened, only a file that is open for writing can be synced."""
    held, opened, plain_open, plain_close = set(), {}, os.open, os.close

    def open_as_windows(path, flags, *rest):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "a folder", str(path))
        descriptor = plain_open(path, flags, *rest)
        opened[descriptor] = (str(path), flags)
        return descriptor

    def close(descriptor):
        held.discard(opened[descriptor][0])
        plain_close(descriptor)

    def locking(descriptor, mode, size):
        assert (mode, size) == (2, 1)
        if opened[descriptor][0] in held:
            raise PermissionError(errno.EACCES, "locked")
        held.add(opened[descriptor][0])

    def fsync(descriptor):
        if not opened[descriptor][1] & os.O_RDWR:
            raise OSError(errno.EBADF, "not open for writing")

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    for name, function in (("open", open_as_windows), ("close", close), ("fsync", fsync)):
        monkeypatch.setattr(files.os, name, function)
    write_bytes(tmp_path / "a.json", b"whole")
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    with locked(tmp_path):
        assert held == {str(tmp_path / "lock")}
        with pytest.raises(InputError, match="is being trained by another process"), locked(tmp_path):
            pass


def test_what_the_disk_says_becomes_one_sentence(tmp_path):
    with (
        pytest.raises(InputError, match=r"not write /x/y \(No space left on device\); no checkpoint") as error,
        explain_disk_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/x/y")
    assert "\n" not in str(error.value)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    with (
        pytest.raises(InputError, match=rf"could not write {tmp_path} .*previous checkpoint is intact"),
        explain_disk_errors(tmp_path),
    ):
        raise OSError(errno.EROFS, "Read-only file system")


STATE = {"step": 7, "rows": torch.arange(15.0).reshape(5, 3), "best": -1.0, "names": ["a", "b"], "memory": None}


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "checkpoints" / "last.pt"
    write_checkpoint(path, STATE)
    read = read_checkpoint(path)
    assert read.pop("format") == FORMAT
    assert torch.equal(read.pop("rows"), STATE["rows"])
    assert read == {name: value for name, value in STATE.items() if name != "rows"}
    assert os.listdir(path.parent) == ["last.pt"]


def test_the_new_one_replaces_the_old_one(tmp_path):
    path = tmp_path / "last.pt"
    write_checkpoint(path, STATE)
    (tmp_path / "last.part.pt").write_bytes(b"half of one, left by a kill")
    write_checkpoint(path, {**STATE, "step": 14})
    assert read_checkpoint(path)["step"] == 14 and os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("where", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_full_disk_is_one_sentence_and_the_old_one_survives(tmp_path, monkeypatch, where, earlier):
    path = tmp_path / "last.pt"
    if earlier:
        write_checkpoint(path, STATE)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    plain = builtins.open

    class Full:
        """A file that takes a little and no more."""

        def __init__(self, file):
            self.file, self.room = file, 100

        def write(self, data):
            self.room -= len(data)
            if self.room < 0:
                full()
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    if where == "open":
        monkeypatch.setattr(files, "open", full, raising=False)
    elif where == "write":
        monkeypatch.setattr(files, "open", lambda *given: Full(plain(*given)), raising=False)
    else:
        monkeypatch.setattr(os, where, full)
    kept = "the previous checkpoint is intact" if earlier else "no checkpoint has been written yet"
    with pytest.raises(
        InputError, match=rf"could not write {path} \(No space left on device\); {kept}: free some disk space"
    ) as error:
        write_checkpoint(path, {**STATE, "step": 14})
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["last.pt"] if earlier else [])
    if earlier:
        assert read_checkpoint(path)["step"] == 7


@pytest.fixture
def little_disk(tmp_path):
    """A real file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(little_disk):
    path = little_disk / "last.pt"
    write_checkpoint(path, STATE)
    with pytest.raises(InputError, match=r"could not write .* \(No space left on device\); the previous checkpoint is intact"):
        write_checkpoint(path, {"step": 8, "rows": torch.zeros(100_000)})
    assert read_checkpoint(path)["step"] == 7 and os.listdir(little_disk) == ["last.pt"]


def test_a_folder_that_may_not_be_written_to(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="could not write"):
        write_checkpoint(tmp_path / "checkpoints" / "last.pt", STATE)


class Mischief:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def unreadable(path, how):
    write_checkpoint(path, STATE)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "garbage":
        path.write_bytes(bytes(range(256)) * 9)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "pickled code":
        path.write_bytes(pickle.dumps(Mischief(path.parent / "made"), protocol=2))
    elif how == "code":
        torch.save({"format": FORMAT, "step": Mischief(path.parent / "made")}, path)


@pytest.mark.parametrize("how", ["truncated", "garbage", "empty", "pickled code", "code"])
def test_an_unreadable_one_is_one_sentence_and_its_code_does_not_run(tmp_path, how):
    path = tmp_path / "last.pt"
    unreadable(path, how)
    with pytest.raises(InputError, match=f"{path} is not a readable checkpoint .*: restore it from a backup") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


def test_an_unreadable_one_points_to_another_where_there_is_one(tmp_path):
    unreadable(tmp_path / "last.pt", "truncated")
    write_checkpoint(tmp_path / "best.pt", STATE)
    with pytest.raises(InputError, match=f"copy {tmp_path / 'best.pt'} over it"):
        read_checkpoint(tmp_path / "last.pt")


def test_other_files_of_torch_and_newer_formats_are_told_apart(tmp_path):
    path = tmp_path / "last.pt"
    torch.save(torch.zeros(3), path)
    with pytest.raises(InputError, match="is not a checkpoint of xbm"):
        read_checkpoint(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(InputError, match="is not a checkpoint of xbm"):
        read_checkpoint(path)
    torch.save({"format": FORMAT + 1}, path)
    with pytest.raises(InputError, match=f"has format {FORMAT + 1}, but this version reads formats up to {FORMAT}: upgrade"):
        read_checkpoint(path)
    with pytest.raises(InputError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pt")


def test_an_archive_of_another_program_is_not_a_checkpoint(tmp_path):
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    (tmp_path / "arrays.npz").rename(tmp_path / "last.pt")
    with pytest.raises(DamagedFileError):
        read_checkpoint(tmp_path / "last.pt")
