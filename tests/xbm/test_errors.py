"""The one exception of the package, and the nearest-name hint."""

import pytest

from xbm import errors
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


def test_errors_carry_their_data_and_form_one_tree(tmp_path):
    diverged = errors.DivergedError(7, tmp_path / "last.pt")
    assert diverged.iteration == 7 and diverged.checkpoint == tmp_path / "last.pt" and "iteration 7" in str(diverged)
    assert errors.DivergedError(7).checkpoint is None
    assert errors.LostPeerError("rank 3 is silent").reason == "rank 3 is silent"
    assert errors.DamagedFileError(tmp_path, "cut short").path == tmp_path
    for kind in (errors.InputError, errors.DivergedError, errors.LostPeerError):
        assert issubclass(kind, errors.XbmError)
    assert not issubclass(errors.DivergedError, ValueError) and issubclass(errors.DamagedFileError, errors.InputError)
    assert issubclass(errors.TerminatedError, errors.LostPeerError)
