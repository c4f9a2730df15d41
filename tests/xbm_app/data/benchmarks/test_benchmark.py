import numpy as np
import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import BENCHMARKS
from xbm_app.data.benchmarks.benchmark import class_order, read_lines, split_fields
from xbm_app.data.images import Row, image_set


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfheader\r\n\r\n a 1 \r\n\nb 2")
    found = list(read_lines(tmp_path / "list.txt", "hint", skip=1))
    assert found == [(f"{tmp_path / 'list.txt'}, line 3", "a 1"), (f"{tmp_path / 'list.txt'}, line 5", "b 2")]


def test_only_images_under_a_free_licence_may_be_redistributed():
    assert {name: each.terms for name, each in BENCHMARKS.items() if each.redistributable} == {"omniglot": "MIT"}


def test_a_list_that_is_missing_or_no_text_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"none.txt is missing: put it there"):
        list(read_lines(tmp_path / "none.txt", "put it there"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputError, match=r"binary.txt cannot be read"):
        list(read_lines(tmp_path / "binary.txt", "put it there"))


def test_the_last_field_keeps_its_spaces_and_a_short_line_is_refused():
    assert split_fields("3 a b", "number name", "x") == ["3", "a b"]
    with pytest.raises(InputError, match="x, line 2: expected `number name`, found '3'"):
        split_fields("3", "number name", "x, line 2")


def test_labels_follow_the_first_appearance_and_are_dense():
    rows = [Row(f"{n}.jpg", label, f"line {n}") for n, label in enumerate(["z", "a", "z", "m"])]
    images = image_set("some", "root", rows, class_order(rows))
    assert images.class_names == ["z", "a", "m"]
    assert images.labels.tolist() == [0, 1, 0, 2] and images.labels.dtype == np.int64
