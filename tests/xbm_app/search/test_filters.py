import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xbm.errors import InputError
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.filters import COLUMN_BYTES, OPERATORS, Column, Columns, Filter, filters_of, matches, parse_filter, plain

VALUES = [None, 0, 3, -2.5, 3.0, "red", "blue", "3", ""]


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("label=cat", Filter("label", "=", "cat")),
        ("label=7", Filter("label", "=", "7")),  # labels are texts
        (" price <= 20 ", Filter("price", "<=", 20)),
        ("when>=2026-01-31", Filter("when", ">=", "2026-01-31")),
        ("code!=007", Filter("code", "!=", "007")),
        ("equation=a=b", Filter("equation", "=", "a=b")),
        ("note=", Filter("note", "=", None)),
    ],
)
def test_a_condition_is_read(text, condition):
    assert parse_filter(text) == condition


@pytest.mark.parametrize("text", ["", "price", "=3", "<", "price ~ 3"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(InputError, match="price<=20"):
        parse_filter(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "0x10", "1_000", "٣", "1" * 30])
def test_only_plain_numbers_are_numbers(text):
    assert plain(text) == text


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    catalogue = Catalogue(tmp_path_factory.mktemp("described"), write=True)
    catalogue.set("dim", 2)
    rows = [{"price": a, "Größe in cm": b} for a in VALUES for b in (1, "x", None)] + [{}]
    entries = [Entry(f"{k}.png", f"label {k % 3}", 1, 1, data=row) for k, row in enumerate(rows)]
    with catalogue.change():
        catalogue.add(entries, np.ones((len(rows), 2)), [b""] * len(rows))
    yield catalogue, rows
    catalogue.close()


@given(
    st.lists(
        st.tuples(st.sampled_from(["price", "Größe in cm"]), st.sampled_from(OPERATORS), st.sampled_from(VALUES)), max_size=3
    )
)
@settings(max_examples=200, deadline=None)
def test_property_a_catalogue_filters_as_plain_python_does(described, conditions):
    catalogue, rows = described
    filters = [Filter(*each) for each in conditions]
    expected = [k + 1 for k, row in enumerate(rows) if all(matches(each, row) for each in filters)]
    assert catalogue.ids(filters).tolist() == catalogue._ids_by_sql(filters, True).tolist() == expected


def test_labels_and_metadata_are_filtered_together(described):
    catalogue, rows = described
    ids = catalogue.ids(filters_of(["price>=0"], "label 1"))
    assert ids.tolist() == [k + 1 for k, row in enumerate(rows) if k % 3 == 1 and row.get("price") in (0, 3, 3.0)]


def test_an_unknown_column_is_named_with_the_nearest(described):
    with pytest.raises(InputError, match="did you mean 'price'"):
        described[0].ids(filters_of(["prize<3"]))
    assert len(described[0].ids(filters_of(['label=" OR 1=1 --']))) == 0


def test_metadata_goes_with_its_row_and_columns_may_come_later(tmp_path):
    catalogue = Catalogue(tmp_path, write=True)
    catalogue.set("dim", 2)
    with catalogue.change():
        catalogue.add([Entry("a", "", 1, 1), Entry("b", "", 1, 1, data={"x": 1})], np.eye(2), [b"", b""])
    with catalogue.change():
        catalogue.add([Entry("b", "", 1, 2, data={"y": "new"})], np.eye(2)[:1], [b""])
        catalogue.describe([(1, {"x": 5})])
    items = catalogue.items([1, 2, 3])
    assert {image: item.data for image, item in items.items()} == {1: {"x": 5}, 3: {"y": "new"}}
    with catalogue.change():
        catalogue.remove([1])
    assert catalogue.columns() == ["x", "y"] and catalogue.ids(filters_of(["x=5"])).tolist() == []
    catalogue.close()


# ------------------------------------------------------------------ columns in memory

EDGES = [2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2.0**53, 2.0**63, -0.0, 5e-324, "é", "e\u0301", "𝕏", "\uffff"]
SOME = st.none() | st.sampled_from([*VALUES, *EDGES]) | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3)
SOME |= st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(SOME, max_size=30), st.sampled_from(OPERATORS), SOME, st.data())
@settings(max_examples=300, deadline=None)
def test_property_a_column_filters_as_row_by_row(values, operator, value, data):
    condition = Filter("x", operator, data.draw(st.sampled_from([value, *values])))
    expected = [matches(condition, {"x": each}) for each in values]
    assert Column(values).meets(condition).tolist() == expected
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE metadata (id INTEGER PRIMARY KEY, x)")
    database.executemany("INSERT INTO metadata (x) VALUES (?)", [(each,) for each in values])
    stored = [each for (each,) in database.execute("SELECT x FROM metadata ORDER BY id")]
    assert Column(stored).meets(condition).tolist() == expected


@given(
    st.lists(st.tuples(SOME, SOME, st.booleans(), st.integers(0, 2)), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from(OPERATORS), SOME), min_size=1, max_size=3),
    st.sampled_from([None, "label 0", "label 9"]),
    st.sampled_from([COLUMN_BYTES, 300, 100, 1]),
)
@settings(max_examples=100, deadline=None)
def test_property_columns_labels_and_what_memory_does_not_hold_are_filtered_together(
    tmp_path_factory, rows, conditions, label, most
):
    catalogue = Catalogue(tmp_path_factory.mktemp("any"), write=True)
    catalogue.set("dim", 1)
    with catalogue.change():
        catalogue.describe([(99, {"x": None, "y": None})])  # both columns exist, whatever the rows have
        for k, (x, y, described, number) in enumerate(rows):
            entry = Entry(f"{k}.png", f"label {number}", 1, 1, data={"x": x, "y": y} if described else {})
            catalogue.add([entry], np.ones((1, 1)), [b""])
    filters = [*filters_of([], label), *(Filter(*each) for each in conditions)]
    plainly = [{"label": f"label {number}"} | ({"x": x, "y": y} if described else {}) for x, y, described, number in rows]
    expected = [k + 1 for k, row in enumerate(plainly) if all(matches(each, row) for each in filters)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xbm_app.search.catalogue.Columns", lambda: Columns(most))
        assert catalogue.ids(filters).tolist() == catalogue.ids(filters).tolist() == expected
        assert catalogue._columns.bytes <= most
    catalogue.close()


@pytest.fixture
def priced(tmp_path):
    """Ten rows that cost 0 to 9."""
    catalogue = Catalogue(tmp_path, write=True)
    catalogue.set("dim", 1)
    with catalogue.change():
        entries = [Entry(f"{k}.png", "", 1, 1, data={"price": k}) for k in range(10)]
        catalogue.add(entries, np.ones((10, 1)), [b""] * 10)
    assert catalogue.ids(filters_of(["price<3"])).tolist() == [1, 2, 3]
    yield catalogue
    catalogue.close()


CHEAP = filters_of(["price<3"])


def test_a_column_is_read_once_for_a_content(priced, monkeypatch):
    monkeypatch.setattr("xbm_app.search.filters.Column.__init__", lambda *_: pytest.fail("read again"))
    assert priced.ids(filters_of(["price>=8"])).tolist() == [9, 10]


def test_own_changes_are_seen_also_before_they_are_complete_and_after_they_failed(priced):
    with priced.change():
        priced.remove([1])
        assert priced.ids(CHEAP).tolist() == [2, 3]
    assert priced.ids(CHEAP).tolist() == [2, 3]

    def fail():
        with priced.change():
            priced.describe([(10, {"price": 1, "color": "red"})])
            assert priced.ids(CHEAP).tolist() == [2, 3, 10] and priced.ids(filters_of(["color=red"])).tolist() == [10]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert priced.ids(CHEAP).tolist() == [2, 3]


def test_changes_of_others_are_seen_unless_the_content_is_held(priced, tmp_path):
    reader, holder = Catalogue(tmp_path), Catalogue(tmp_path)
    holder.hold()
    assert reader.ids(CHEAP).tolist() == holder.ids(CHEAP).tolist() == [1, 2, 3]
    with priced.change():
        priced.remove([2])
        priced.add([Entry("new.png", "", 1, 1, data={"price": -1})], np.ones((1, 1)), [b""])
    assert reader.ids(CHEAP).tolist() == [1, 3, 11] and holder.ids(CHEAP).tolist() == [1, 2, 3]
    reader.close()
    holder.close()


def test_columns_of_no_more_than_the_allowed_memory_are_kept():
    columns, read = Columns(most=2500), []

    def get(name, count):
        column = columns.get(name, lambda: read.append(name) or range(count))
        assert columns.bytes <= 2500
        return column

    assert get("a", 20) and get("b", 20) and get("a", 20) and get("c", 20)  # each takes 800 bytes
    assert get("d", 20) and get("a", 20) and get("b", 20)  # for which there was no room
    assert get("long", 1000) is None and get("long", 1000) is None and get("text", 2) and get("b", 20)
    assert read == ["a", "b", "c", "d", "b", "long", "text"]


def test_threads_share_the_columns_of_a_catalogue(priced):
    def search(number):
        return priced.ids(filters_of([f"price<{number % 10}"])).tolist() == list(range(1, number % 10 + 1))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(search, range(200)))
