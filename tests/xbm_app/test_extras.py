import pytest

from xbm.errors import InputError
from xbm_app.extras import require


def test_what_is_there_passes():
    require("search", "json", "torch")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["json", "no_such_one"], "this needs the package no_such_one: pip install 'xbm[search]'"),
        (["no_such_one", "nor_this"], "this needs the packages no_such_one, nor_this: pip install 'xbm[search]'"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(names, message):
    with pytest.raises(InputError) as caught:
        require("search", *names)
    assert str(caught.value) == message
