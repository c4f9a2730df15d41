import warnings
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.own_images import read_folder, read_records, read_table, write_split


def draw(path: Path, size: tuple[int, int] = (23, 19)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (len(path.name), 3, 9)).save(path)
    return path


def folder(root: Path, *classes: str, shots: int = 2) -> Path:
    for name in classes:
        for shot in range(shots):
            draw(root / name / f"{shot}.png")
    return root


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def sets(dataset):
    (protocol,) = dataset.protocols
    return dataset.train, protocol.query, protocol.gallery


def contents(dataset):
    return [
        None if images is None else [(p, images.class_names[l]) for p, l in zip(images.paths, images.labels)]
        for images in sets(dataset)
    ]


def test_every_folder_that_holds_images_is_a_class_named_by_its_path(tmp_path):
    folder(tmp_path, "cats/tabby", "cats/manx", "cats", "dogs")
    draw(tmp_path / ".hidden" / "1.png")
    draw(tmp_path / "dogs" / ".1.png")
    (tmp_path / "dogs" / "notes.txt").write_text("no image")
    train, test, gallery = sets(read_folder(tmp_path))
    assert sorted([*train.class_names, *test.class_names]) == ["cats", "cats/manx", "cats/tabby", "dogs"]
    assert len(train) + len(test) == 8 and gallery is None
    assert np.array_equal(np.unique(train.labels), np.arange(train.num_classes))


def test_the_split_is_disjoint_in_classes_and_the_same_for_the_same_seed(tmp_path):
    names = [f"part {n:02d}" for n in range(21)]
    folder(tmp_path, *names)
    train, test, _ = sets(read_folder(tmp_path, seed=5))
    assert len(train.class_names) == 11 and len(test.class_names) == 10
    assert not set(train.class_names) & set(test.class_names)
    assert contents(read_folder(tmp_path, seed=5)) == contents(read_folder(tmp_path, seed=5))
    assert len({tuple(sets(read_folder(tmp_path, seed=seed))[1].class_names) for seed in range(4)}) == 4
    assert len(sets(read_folder(tmp_path, test_fraction=0.2))[1].class_names) == 4
    # Written down: the split must never change between versions or machines.
    assert sets(read_folder(tmp_path, seed=0))[1].class_names[:3] == ["part 02", "part 04", "part 05"]


def test_train_and_test_folders_are_the_split(tmp_path):
    folder(tmp_path, "train/a", "train/b", "test/c", "test/d")
    train, test, _ = sets(read_folder(tmp_path))
    assert train.class_names == ["a", "b"] and test.class_names == ["c", "d"]
    assert train.paths[0] == "train/a/0.png"


def test_folders_that_look_like_another_split_are_refused(tmp_path):
    folder(tmp_path, "train/a", "train/b", "val/c", "val/d")
    with pytest.raises(InputError, match="has the folders train, val; keep train and test"):
        read_folder(tmp_path)


def test_classes_in_both_halves_are_warned_about(tmp_path):
    folder(tmp_path, "train/a", "train/b", "test/b", "test/c")
    with pytest.warns(UserWarning, match=r"1 classes are in training and in testing, such as 'b'"):
        read_folder(tmp_path)


def test_an_image_beside_the_class_folders_is_told_where_to_go(tmp_path):
    folder(tmp_path, "a", "b", "c", "d")
    stray = draw(tmp_path / "stray.jpg")
    with pytest.raises(InputError, match=f"{stray}: lies beside the class folders; move it into"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("classes", "sentence"), [((), "holds no images"), (("a", "b", "c"), "3 classes are too few"), (None, "is not a folder")]
)
def test_a_folder_that_cannot_be_split_says_why(tmp_path, classes, sentence):
    root = tmp_path / "photos"
    if classes is not None:
        root.mkdir()
        folder(root, *classes)
    with pytest.raises(InputError, match=sentence):
        read_folder(root)


def test_a_share_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="test_fraction"):
        read_folder(folder(tmp_path, "a", "b", "c", "d"), test_fraction=1.5)


def test_a_link_that_leads_back_up_or_across_is_not_walked_twice(tmp_path):
    folder(tmp_path, "a", "b", "c", "d")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "twin").symlink_to(tmp_path / "b", target_is_directory=True)
    train, test, _ = sets(read_folder(tmp_path))
    assert len(train) + len(test) == 8


def test_a_written_split_is_read_back_as_it_was(tmp_path):
    names = ["x, y", 'with "quotes"', "naïve", "z" * 40, "plain"]
    dataset = read_folder(folder(tmp_path / "photos", *names))
    write_split(dataset, tmp_path / "run" / "split.csv")
    again = read_table(tmp_path / "run" / "split.csv", root=tmp_path / "photos")
    assert contents(again) == contents(dataset)
    assert again.train.labels.tolist() == dataset.train.labels.tolist()
    assert again.train.open(0).size == (23, 19)
    assert not list((tmp_path / "run").glob("*.part*"))


def test_roles_and_boxes_are_read_and_written_back(tmp_path):
    rows = ["path,label,split,role,left,top,right,bottom"]
    rows += [f"a{n}.png,a,train,,0,0,9,9" for n in range(2)] + [f"b{n}.png,b,train,,1,0,9,9" for n in range(2)]
    rows += ["c0.png,c,test,query,2.4,3,20,17", "c1.png,c,test,gallery,0,0,5,6", "d.png,d,test,gallery,0,0,5,7"]
    dataset = read_table(table(tmp_path / "mine.csv", *rows))
    train, query, gallery = sets(dataset)
    assert query.labels.tolist() == [0] and gallery.labels.tolist() == [0, 1]
    assert query.class_names == gallery.class_names == ["c", "d"]
    assert query.boxes.tolist() == [[2, 3, 20, 17]]
    assert dataset.protocols[0].ks == (1, 2)
    draw(tmp_path / "c0.png")
    assert query.open(0).size == (18, 14)
    write_split(dataset, tmp_path / "split.csv")
    again = read_table(tmp_path / "split.csv")
    assert contents(again) == contents(dataset) and np.array_equal(sets(again)[2].boxes, gallery.boxes)
    assert len(train) == 4


def test_labels_that_share_a_hash_stay_two_classes(tmp_path):
    assert crc32(b"plumless") == crc32(b"buckeroo")
    rows = [f"{label}{n}.png,{label},train" for label in ("plumless", "buckeroo") for n in range(3)]
    rows += [f"{label}{n}.png,{label},test" for label in ("1", "01") for n in range(2)]
    train, test, _ = sets(read_table(table(tmp_path / "t.csv", "path,label,split", *rows)))
    assert train.class_names == ["buckeroo", "plumless"] and train.labels.tolist() == [1, 1, 1, 0, 0, 0]
    assert test.class_names == ["01", "1"]


def test_labels_that_differ_only_in_how_an_accent_is_encoded_are_refused(tmp_path):
    rows = ["0.jpg,caf\u00e9", "1.jpg,cafe\u0301", "2.jpg,b", "3.jpg,c"]
    with pytest.raises(
        InputError, match=r"line \d: label 'caf.+' differs from 'caf.+' \(.*line \d\) only in spaces or encoding"
    ):
        read_table(table(tmp_path / "t.csv", "path,label", *rows))


def test_a_parquet_table_gives_what_the_csv_gives(tmp_path):
    import pyarrow
    import pyarrow.parquet

    paths, labels = [f"{n}.jpg" for n in range(12)], [2**40 + n // 2 for n in range(12)]
    extra = pyarrow.table({"price": [1.5] * 12, "path": paths, "label": pyarrow.array(labels).dictionary_encode()})
    pyarrow.parquet.write_table(extra, tmp_path / "t.parquet")
    rows = [f"{path},{label}" for path, label in zip(paths, labels)]
    table(tmp_path / "t.csv", "path,label", *rows)
    assert contents(read_table(tmp_path / "t.parquet")) == contents(read_table(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    ("header", "row", "sentence"),
    [
        ("path,label", "../x.jpg,a", "'../x.jpg' leads out of the data's root"),
        ("path,label", "/x.jpg,a", "'/x.jpg' is an absolute path"),
        ("path,label", "x.jpg, ", "the label is empty"),
        ("path,label", "x.jpg,a,b", "3 fields under 2 columns"),
        ("path,label", "0.jpg,b", "0.jpg has label 'b' here and 'a' in"),
        ("path,label", "./0.jpg,a", "0.jpg is already listed in"),
        ("path,label", "x.jpg,a ", "label 'a ' differs from 'a'"),
        ("path,label,split", "x.jpg,a,tset", "unknown split 'tset': did you mean 'test'"),
        ("path,label,split", "x.jpg,a,", "unknown split ''"),
        ("path,label,split,role", "x.jpg,a,test,qury", "unknown role 'qury': did you mean 'query'"),
        ("path,label,split,role", "x.jpg,a,train,query", "a train row has no role"),
        ("path,label,left,top,right,bottom", "x.jpg,a,1,2,x,4", "must be numbers in every row"),
        ("path,label,left,top,right,bottom", "x.jpg,a,1,2,nan,4", "must be numbers in every row"),
        ("path,label,left,top,right,bottom", "x.jpg,a,5,2,5,4", "box 5, 2, 5, 4 is empty"),
    ],
)
def test_a_bad_row_is_one_sentence_with_file_and_line(tmp_path, header, row, sentence):
    fill = {2: "", 3: ",train", 4: ",train,", 6: ",0,0,9,9"}[header.count(",") + 1]
    good = [f"{n}.jpg,{label}{fill}" for n, label in enumerate("aabbccdd")]
    file = table(tmp_path / "t.csv", header, *good, row)
    with pytest.raises(InputError) as error:
        read_table(file)
    assert str(error.value).startswith(f"{file}, line 10: ")
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0.jpg,a,train,"], "no row has split test"),
        (["0.jpg,a,test,"], "no row has split train"),
        (["0.jpg,a,train,", "1.jpg,b,test,query"], "both query and gallery rows are needed"),
        (["0.jpg,a,train,", "1.jpg,b,test,query", "2.jpg,c,test,gallery"], "line 3: no gallery row has the label 'b'"),
        (
            ["0.jpg,a,train,", "1.jpg,b,test,", "2.jpg,b,test,query", "3.jpg,b,test,gallery"],
            "line 3: this test row has no role but others have",
        ),
        ([], "has no rows below its header"),
    ],
)
def test_a_split_that_cannot_be_scored_says_why(tmp_path, rows, sentence):
    with pytest.raises(InputError, match=sentence):
        read_table(table(tmp_path / "t.csv", "path,label,split,role", *rows))


def test_a_disjoint_split_is_not_warned_about(tmp_path):
    rows = ["0.jpg,a,train", "1.jpg,a,train", "2.jpg,b,test", "3.jpg,b,test"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = read_table(table(tmp_path / "t.csv", "path,label,split", *rows))
    assert dataset.protocols[0].ks == (1,)


def test_a_data_set_with_several_protocols_is_not_written_as_one_split(tmp_path):
    from dataclasses import replace

    dataset = read_folder(folder(tmp_path, "a", "b", "c", "d"))
    with pytest.raises(InputError, match="one test protocol"):
        write_split(replace(dataset, protocols=dataset.protocols * 2), tmp_path / "split.csv")


def write(path, data):
    path.write_bytes(data)
    return path


def test_places_follow_the_lines_of_the_file_through_quoted_breaks(tmp_path):
    file = write(tmp_path / "t.csv", b'\xef\xbb\xbf Path ,LABEL,price\r\n"a\nb.jpg",x,1\r\n\r\nc.jpg,y,2\r\n')
    assert list(read_records(file)) == [
        (f"{file}, line 3", {"path": "a\nb.jpg", "label": "x", "price": "1"}),
        (f"{file}, line 5", {"path": "c.jpg", "label": "y", "price": "2"}),
    ]


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"path,lable\n", "column 'lable' looks like 'label'"),
        (b"path,label,splits\n", "column 'splits' looks like 'split'"),
        (b"file,class\n", "must name the columns path and label, found file, class"),
        (b"", "must name the columns path and label, found none"),
        (b"path;label\n", "found path;label"),
        (b"path,label,path\n", "column 'path' occurs twice"),
        (b"path,label,left,top\n", "a box needs the columns left, top, right, bottom; found only left, top"),
        (b"path,label,role\n", "a role column needs a split column"),
        (b"path,label\n\xff\xfe,a\n", "is not UTF-8"),
    ],
)
def test_a_header_that_cannot_be_used_says_what_to_do(tmp_path, header, sentence):
    with pytest.raises(InputError, match=sentence):
        list(read_records(write(tmp_path / "t.csv", header)))


@pytest.mark.parametrize("name", ["none.csv", "none.parquet"])
def test_a_table_that_is_missing_is_named(tmp_path, name):
    with pytest.raises(InputError, match=f"{name} is missing"):
        list(read_records(tmp_path / name))


def test_other_files_are_no_tables(tmp_path):
    with pytest.raises(InputError, match=r"t.xlsx: .*must end in .csv or .parquet"):
        read_records(write(tmp_path / "t.xlsx", b""))


def test_broken_parquet_is_named(tmp_path):
    with pytest.raises(InputError, match=r"t.parquet cannot be read as Parquet"):
        list(read_records(write(tmp_path / "t.parquet", b"PAR1 but not really PAR1")))


def test_nulls_in_parquet_are_empty_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = {"path": ["a.jpg", None], "label": pyarrow.array([7, None]), "other": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert list(read_records(tmp_path / "t.parquet")) == [
        (f"{tmp_path / 't.parquet'}, row 1", {"path": "a.jpg", "label": "7"}),
        (f"{tmp_path / 't.parquet'}, row 2", {"path": "", "label": ""}),
    ]
