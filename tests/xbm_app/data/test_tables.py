import pytest

from xbm.errors import InputError
from xbm_app.data.tables import read_records


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
    with pytest.raises(InputError, match=r"t.xlsx: a table of images ends in .csv or .parquet"):
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
