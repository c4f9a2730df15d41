import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xbm.errors import InputError
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.filters import OPERATORS, Filter, filters_of, matches, parse_filter, plain

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
    assert catalogue.ids(filters).tolist() == expected


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
