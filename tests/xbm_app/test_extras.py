import pytest

from xbm.errors import InputError
from xbm_app.extras import require


def test_what_is_there_passes():
    require("serve", "json", "torch")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["json", "no_such_one"], "this needs the package no_such_one: pip install 'xbm[serve]'"),
        (["no_such_one", "nor_this"], "this needs the packages no_such_one, nor_this: pip install 'xbm[serve]'"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(names, message):
    with pytest.raises(InputError) as caught:
        require("serve", *names)
    assert str(caught.value) == message
