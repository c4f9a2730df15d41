import fcntl
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny import draw_photos
from xbm.errors import InputError
from xbm_app.files import CHECKSUMS, read_checkpoint, read_json, write_checkpoint
from xbm_app.search import update as module
from xbm_app.search.catalogue import Catalogue, root_of
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import Changes, entries_of, fingerprint, thumbnail, update
from xbm_app.train.load import Embedder, load


def told_by(run, source, out):
    told = []
    return update(run, source, out, lambda error: told.append(str(error)), quiet=True), told


def content(out):
    """{path: (label, vector)} of an index, after a check that nothing is there twice."""
    catalogue = Catalogue(out)
    ids = catalogue.ids()
    items, vectors = catalogue.items(ids), catalogue.vectors(ids)
    assert len({item.path for item in items.values()}) == len(ids) == len(items)
    assert all(catalogue.thumbnail(each) for each in ids.tolist())
    catalogue.close()
    return {items[each].path: (items[each].label, vector) for each, vector in zip(ids.tolist(), vectors)}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[path][0] == other[path][0] and np.allclose(one[path][1], other[path][1], atol=1e-5) for path in one
    )


def test_vectors_and_labels_are_those_of_the_run(searchable, own_photos, made_index):
    found = content(made_index)
    paths = sorted(found)
    assert len(found) == 72 and all(found[path][0] == path.split("/")[0] for path in paths)
    wanted = load(searchable).embed([own_photos / path for path in paths]).numpy()
    assert np.allclose(np.stack([found[path][1] for path in paths]), wanted, atol=1e-5)


def test_the_second_time_only_what_has_changed_is_embedded(searchable, photos, tmp_path, monkeypatch):
    out = tmp_path / "index"
    assert told_by(searchable, photos, out) == (Changes(new=72), [])
    embedded = []
    honest = Embedder.embed_views
    monkeypatch.setattr(Embedder, "embed_views", lambda self, views: embedded.extend(views) or honest(self, views))
    assert told_by(searchable, photos, out)[0] == Changes(unchanged=72) and embedded == []
    (photos / "class_00" / "0.png").unlink()
    shutil.copy(photos / "class_05" / "5.png", photos / "class_00" / "new.png")
    Image.new("RGB", (16, 16), "red").save(photos / "class_01" / "1.png")
    assert told_by(searchable, photos, out)[0] == Changes(new=1, changed=1, removed=1, unchanged=70) and len(embedded) == 2
    monkeypatch.undo()
    told_by(searchable, photos, tmp_path / "from_scratch")
    assert same(content(out), content(tmp_path / "from_scratch"))


def test_a_file_of_the_same_size_but_another_time_has_changed(searchable, photos, tmp_path):
    told_by(searchable, photos, tmp_path / "index")
    os.utime(photos / "class_04" / "4.png", ns=(1, 1))
    assert told_by(searchable, photos, tmp_path / "index")[0] == Changes(changed=1, unchanged=71)


def test_another_label_in_the_table_needs_no_embedding(searchable, photos, tmp_path, monkeypatch):
    table, out = photos / "list.csv", tmp_path / "index"
    table.write_text("path,label\nclass_00/0.png,a\nclass_00/1.png,b\n")
    told_by(searchable, table, out)
    table.write_text("path,label\nclass_00/0.png,a\nclass_00/1.png,c\n")
    monkeypatch.setattr(Embedder, "embed_views", lambda *_: pytest.fail("embedded"))
    assert told_by(searchable, table, out)[0] == Changes(unchanged=2)
    assert {path: label for path, (label, _) in content(out).items()} == {"class_00/0.png": "a", "class_00/1.png": "c"}


def test_boxes_are_cut_out(searchable, photos, tmp_path):
    wide = Image.new("RGB", (40, 20), "red")
    wide.paste("blue", (20, 0, 40, 20))
    wide.save(photos / "wide.png")
    (photos / "list.csv").write_text("path,label,left,top,right,bottom\nwide.png,r,0,0,20,20\nwide.png,b,20,0,40,20\n")
    told_by(searchable, photos / "list.csv", tmp_path / "index")
    catalogue = Catalogue(tmp_path / "index")
    wanted = load(searchable).embed([Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]).numpy()
    assert np.allclose(catalogue.vectors(catalogue.ids()), wanted, atol=1e-5)


def test_an_image_that_cannot_be_read_is_named_and_the_rest_goes_on(searchable, photos, tmp_path):
    out = tmp_path / "index"
    told_by(searchable, photos, out)
    (photos / "class_02" / "3.png").write_bytes(b"no picture")
    (photos / "class_03" / "late.jpg").write_text("text")
    changes, told = told_by(searchable, photos, out)
    assert changes == Changes(new=1, changed=1, unchanged=71, unreadable=2)
    assert len(told) == 2 and all("cannot be read as an image" in text for text in told)
    assert len(content(out)) == 71 and "class_02/3.png" not in content(out)


def test_a_run_with_other_weights_embeds_everything_again(searchable, photos, tmp_path):
    run, out = shutil.copytree(searchable, tmp_path / "run"), tmp_path / "index"
    told_by(run, photos, out)
    before = content(out)
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    state["model"]["head.weight"] *= -1
    state["model"]["head.bias"] *= -1
    for path in (run / "checkpoints").glob("*.pt"):
        torch.save(state, path)
    changes, told = told_by(run, photos, out)
    assert changes == Changes(new=72) and "have changed" in told[0]
    assert all(np.allclose(vector, -before[path][1], atol=1e-5) for path, (_, vector) in content(out).items())
    assert len(list(out.glob("model-*.pt"))) == 1


def test_an_index_of_something_else_is_not_touched(searchable, photos, made_index, tmp_path):
    before = content(made_index)
    with pytest.raises(InputError, match="is an index of the source"):
        told_by(searchable, photos, made_index)
    run = shutil.copytree(searchable, tmp_path / "other_run")
    with pytest.raises(InputError, match="is an index of the run"):
        told_by(run, Path(Catalogue(made_index).get("source")), made_index)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="neither empty nor an index"):
        told_by(searchable, photos, tmp_path / "home")
    assert same(before, content(made_index))


def test_a_folder_that_lost_all_its_images_does_not_empty_the_index(searchable, photos, tmp_path):
    out = tmp_path / "index"
    told_by(searchable, photos, out)
    photos.rename(tmp_path / "away")
    photos.mkdir()
    with pytest.raises(InputError, match="contains no images"):
        told_by(searchable, photos, out)
    assert len(content(out)) == 72


def test_two_at_a_time_are_refused(searchable, own_photos, tmp_path):
    (tmp_path / "index").mkdir()
    with (tmp_path / "index" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another `xbm index` is writing"):
            told_by(searchable, own_photos, tmp_path / "index")


def test_stopped_in_the_middle_it_goes_on_where_it_was(searchable, photos, made_index, tmp_path, monkeypatch):
    out, honest, calls = tmp_path / "index", Embedder.embed_views, []

    def stops(self, views):
        calls.append(len(views))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(self, views)

    monkeypatch.setattr(module, "BATCH", 10)
    monkeypatch.setattr(Embedder, "embed_views", stops)
    with pytest.raises(KeyboardInterrupt):
        told_by(searchable, photos, out)
    assert len(content(out)) == 30
    assert told_by(searchable, photos, out)[0] == Changes(new=42, unchanged=30)
    assert same(content(out), content(made_index))


@pytest.mark.slow
def test_killed_again_and_again_nothing_is_lost_or_doubled(searchable, tmp_path):
    photos, out = draw_photos(tmp_path / "photos", classes=40, each=50), tmp_path / "index"
    command = [sys.executable, "-m", "xbm", "index", str(searchable), str(photos), "--out", str(out)]
    script = [sys.executable, "-c", SLOWED, *command[3:]]
    seen, draw = [], np.random.default_rng(0)
    for _ in range(10):
        process = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, begun = seen[-1] if seen else 0, time.monotonic()
        while count(out) <= before and process.poll() is None and time.monotonic() - begun < 60:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(count(out))
        content(out)
    assert seen == sorted(seen) and 0 < seen[0] < seen[-1] < 2000  # it was killed on the way, each time further on
    assert subprocess.run(command, capture_output=True).returncode == 0
    told_by(searchable, photos, tmp_path / "at_once")
    assert same(content(out), content(tmp_path / "at_once"))
    assert len(list(out.glob("model-*.pt"))) == 1 and not list(out.glob("*.part*"))


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["lock", "index.sqlite", "index.sqlite-wal"])
def test_what_is_planted_in_the_place_of_a_file_is_neither_followed_nor_waited_for(
    searchable, own_photos, made_index, tmp_path, name, kind
):
    out = Path(shutil.copytree(made_index, tmp_path / "index"))
    planted, mine = out / name, tmp_path / "mine.txt"
    mine.write_text("keep me")
    planted.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(planted)
    elif kind == "folder":
        planted.mkdir()
    else:
        planted.symlink_to("../mine.txt" if kind == "link" else "../other.txt")
    with pytest.raises(InputError, match=r"is a link, a pipe|neither empty nor an index"):
        told_by(searchable, own_photos, out)
    assert mine.read_text() == "keep me" and not (tmp_path / "other.txt").exists()


CUT_OFF = """
import os, signal, sys
from pathlib import Path
from xbm_app.search.catalogue import Catalogue
catalogue = Catalogue(Path(sys.argv[1]), write=True)
with catalogue.change():
    catalogue.remove(catalogue.ids()[:5].tolist())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_index_whose_update_was_killed_can_be_searched_and_completed(searchable, own_photos, made_index, tmp_path):
    out = Path(shutil.copytree(made_index, tmp_path / "index"))
    assert subprocess.run([sys.executable, "-c", CUT_OFF, str(out)]).returncode == -signal.SIGKILL
    assert (out / "index.sqlite-wal").stat().st_size  # which the first to close the index moves into the file
    for _ in range(2):
        searcher = Searcher(out)
        assert len(searcher.search(searcher.embed(searcher.open(own_photos / "class_00" / "0.png")), 3)) == 3
        searcher.catalogue.close()
    assert told_by(searchable, own_photos, out) == (Changes(new=5, unchanged=67), [])
    assert same(content(out), content(made_index)) and "index.sqlite" in read_json(out / CHECKSUMS)


SLOWED = """
import sys, time
from xbm_app.train.load import Embedder
honest = Embedder.embed_views
def slow(self, views):
    time.sleep(0.1)
    return honest(self, views)
Embedder.embed_views = slow
from xbm.__main__ import main
sys.argv = ["xbm", *sys.argv[1:]]
main()
"""


def count(out):
    try:
        database = sqlite3.connect(out / "index.sqlite", timeout=5)
        found = database.execute("SELECT count(*) FROM images").fetchone()[0]
        database.close()
        return found
    except sqlite3.OperationalError:
        return 0


def test_the_fingerprint_tells_weights_and_preparation_apart(searchable):
    one, other = load(searchable), load(searchable)
    assert fingerprint(one) == fingerprint(other)
    other.model.head.bias.data[3] += 1
    assert fingerprint(one) != fingerprint(other)


def test_thumbnails_are_small_and_keep_their_shape():
    image = Image.open(io.BytesIO(thumbnail(Image.new("RGB", (1000, 500), "red"))))
    assert (image.format, image.size) == ("WEBP", (192, 96))
    assert Image.open(io.BytesIO(thumbnail(Image.new("RGB", (30, 20))))).size == (30, 20)


# ------------------------------------------------------------------ what is to be indexed


@pytest.fixture
def few_photos(tmp_path):
    for name in ("cats/1.png", "cats/old/2.jpg", "loose.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(tmp_path / "photos" / name)
    return tmp_path / "photos"


def entries_and_notes(source):
    told = []
    entries = entries_of(source, lambda error: told.append(str(error)))
    return entries, told


def test_in_a_folder_the_label_is_the_folder(few_photos):
    (few_photos / "notes.txt").write_text("no image")
    entries, told = entries_and_notes(few_photos)
    assert {entry.path: entry.label for entry in entries} == {
        "cats/1.png": "cats",
        "cats/old/2.jpg": "cats/old",
        "loose.png": "",
    }
    assert told == [] and root_of(few_photos) == few_photos
    stat = (few_photos / "loose.png").stat()
    (loose,) = [entry for entry in entries if entry.path == "loose.png"]
    assert (loose.size, loose.time, loose.key) == (stat.st_size, stat.st_mtime_ns, ("loose.png", ""))


def test_of_a_table_the_bad_rows_are_told_and_the_rest_is_entries_and_notes(few_photos):
    table = few_photos / "list.csv"
    rows = ["path,label", "cats/1.png,tom", "gone.png,tom", "loose.png,", "cats/1.png,tom", "../x.png,tom", "a,b,c", ",tom"]
    table.write_text("\n".join(rows))
    entries, told = entries_and_notes(table)
    assert [(entry.path, entry.label) for entry in entries] == [("cats/1.png", "tom"), ("loose.png", "")]
    assert [text.split(": ")[0].rpartition(", ")[2] for text in told] == ["line 3", "line 5", "line 6", "line 7", "line 8"]
    for note, words in zip(told, ["gone.png does not exist", "listed twice", "leads out", "3 fields"]):
        assert words in note
    assert root_of(table) == few_photos


def test_boxes_make_several_images_of_one_picture(few_photos):
    table = few_photos / "list.csv"
    table.write_text("path,label,left,top,right,bottom\nloose.png,a,0,0,9,9\nloose.png,b,5,5,20,20\nloose.png,c,5,5,5,9\n")
    entries, told = entries_and_notes(table)
    assert [entry.key for entry in entries] == [("loose.png", "0,0,9,9"), ("loose.png", "5,5,20,20")]
    assert len(told) == 1 and "is empty" in told[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "neither a folder nor"), ("empty", "contains no images"), ("none.csv", "contains no images")],
)
def test_nothing_to_index_is_an_error(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.csv").write_text("path,label\nx.png,a\n")
    with pytest.raises(InputError, match=message):
        entries_and_notes(tmp_path / name)


def test_what_is_only_out_of_reach_stays_in_the_index(searchable, photos, tmp_path, monkeypatch):
    out = tmp_path / "index"
    told_by(searchable, photos, out)
    honest_scan, honest_stat = os.scandir, Path.stat

    def scandir(folder):
        if Path(os.fsdecode(folder)).name in ("class_03", "class_04"):
            raise PermissionError(13, "Permission denied", str(folder))
        return honest_scan(folder)

    def stat(path, **options):
        if path.parent.name == "class_04":  # a folder that may not even be entered
            raise PermissionError(13, "Permission denied", str(path))
        return honest_stat(path, **options)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "stat", stat)
    (photos / "class_01" / "0.png").unlink()
    (photos / os.fsdecode(b"caf\xe9.png")).write_bytes((photos / "class_00" / "0.png").read_bytes())
    changes, told = told_by(searchable, photos, out)
    assert (changes.removed, changes.new) == (1, 0) and len(content(out)) == 71
    assert sum("cannot be listed" in each for each in told) == 2 and sum("not UTF-8" in each for each in told) == 1


def test_what_lies_behind_a_dangling_link_stays_in_the_index(searchable, photos, tmp_path):
    out, disk = tmp_path / "index", tmp_path / "disk"
    disk.mkdir()
    for name in ("class_03", "class_04/0.png"):
        shutil.move(photos / name, disk / Path(name).name)
        (photos / name).symlink_to(disk / Path(name).name)
    assert told_by(searchable, photos, out) == (Changes(new=72), [])
    disk.rename(tmp_path / "unmounted")
    (photos / "class_01" / "0.png").unlink()
    changes, told = told_by(searchable, photos, out)
    assert changes.removed == 1 and len(content(out)) == 71
    kept = [each for each in told if "cannot be reached" in each]
    assert sorted(each.split()[0] for each in kept) == [str(photos / "class_03"), str(photos / "class_04" / "0.png")]
    (tmp_path / "unmounted").rename(disk)
    assert told_by(searchable, photos, out)[1] == [] and len(content(out)) == 71
    (photos / "class_03").unlink()  # the link itself is deleted
    assert told_by(searchable, photos, out)[0].removed == 6


def test_a_row_that_was_removed_from_a_table_leaves_the_index_and_one_out_of_reach_stays(
    searchable, photos, tmp_path, monkeypatch
):
    table, out = photos / "list.csv", tmp_path / "index"
    lines = [f"class_0{k}/0.png,{k}" for k in range(4)]
    table.write_text("\n".join(["path,label", *lines]))
    assert told_by(searchable, table, out) == (Changes(new=4), [])
    honest = Path.stat

    def stat(path, **options):
        if path.parent.name == "class_02":
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    table.write_text("\n".join(["path,label", *lines[1:]]))
    changes, (told,) = told_by(searchable, table, out)
    assert changes.removed == 1 and "cannot be read (Permission denied)" in told
    assert sorted(content(out)) == ["class_01/0.png", "class_02/0.png", "class_03/0.png"]


def test_a_model_that_gives_nan_is_refused(searchable, photos, tmp_path):
    state = read_checkpoint(searchable / "checkpoints" / "last.pt")
    state["model"] = {name: x * float("nan") if x.is_floating_point() else x for name, x in state["model"].items()}
    write_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt", state)
    with pytest.raises(InputError, match="gives NaN or infinity"):
        told_by(tmp_path / "run", photos, tmp_path / "index")
    with pytest.raises(InputError, match="gives NaN or infinity"):
        load(tmp_path / "run").embed([photos / "class_00" / "0.png"])
