import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.search.sources import entries_of, root_of


@pytest.fixture
def photos(tmp_path):
    for name in ("cats/1.png", "cats/old/2.jpg", "loose.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(tmp_path / "photos" / name)
    return tmp_path / "photos"


def read(source):
    told = []
    entries = entries_of(source, lambda error: told.append(str(error)))
    return entries, told


def test_in_a_folder_the_label_is_the_folder(photos):
    (photos / "notes.txt").write_text("no image")
    entries, told = read(photos)
    assert {entry.path: entry.label for entry in entries} == {
        "cats/1.png": "cats",
        "cats/old/2.jpg": "cats/old",
        "loose.png": "",
    }
    assert told == [] and root_of(photos) == photos
    stat = (photos / "loose.png").stat()
    (loose,) = [entry for entry in entries if entry.path == "loose.png"]
    assert (loose.size, loose.time, loose.key) == (stat.st_size, stat.st_mtime_ns, ("loose.png", ""))


def test_of_a_table_the_bad_rows_are_told_and_the_rest_is_read(photos):
    table = photos / "list.csv"
    rows = ["path,label", "cats/1.png,tom", "gone.png,tom", "loose.png,", "cats/1.png,tom", "../x.png,tom", "a,b,c", ",tom"]
    table.write_text("\n".join(rows))
    entries, told = read(table)
    assert [(entry.path, entry.label) for entry in entries] == [("cats/1.png", "tom"), ("loose.png", "")]
    assert [text.split(": ")[0].rpartition(", ")[2] for text in told] == ["line 3", "line 5", "line 6", "line 7", "line 8"]
    assert "gone.png is missing" in told[0] and "named twice" in told[1] and "leads out" in told[2] and "3 fields" in told[3]
    assert root_of(table) == photos


def test_boxes_make_several_images_of_one_picture(photos):
    table = photos / "list.csv"
    table.write_text("path,label,left,top,right,bottom\nloose.png,a,0,0,9,9\nloose.png,b,5,5,20,20\nloose.png,c,5,5,5,9\n")
    entries, told = read(table)
    assert [entry.key for entry in entries] == [("loose.png", "0,0,9,9"), ("loose.png", "5,5,20,20")]
    assert len(told) == 1 and "is empty" in told[0]


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "neither a folder nor"), ("empty", "holds no images"), ("none.csv", "holds no images")]
)
def test_nothing_to_index_is_an_error(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.csv").write_text("path,label\nx.png,a\n")
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)
