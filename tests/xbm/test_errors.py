"""The one exception of the package, and the nearest-name hint."""

import pytest

from xbm.errors import InputError, unknown


@pytest.mark.parametrize("kind", [InputError, ValueError, TypeError])
def test_callers_may_catch_whichever_they_expect(kind):
    with pytest.raises(kind):
        raise InputError("pass ids")


def test_a_near_miss_names_the_nearest_and_lists_all_in_order():
    error = unknown("loss", "tripplet", ["triplet", "contrastive"])
    assert str(error) == "unknown loss 'tripplet': did you mean 'triplet'? (contrastive, triplet)"
    assert isinstance(error, InputError)


def test_nothing_near_lists_what_there_is():
    assert str(unknown("engine", "zzz", ("streaming", "auto"))) == "unknown engine 'zzz': choose one of auto, streaming"


def test_names_may_come_from_anything_iterable_and_the_given_one_may_be_no_text():
    assert "choose one of a, b" in str(unknown("size", 7, iter({"b": 1, "a": 2})))
