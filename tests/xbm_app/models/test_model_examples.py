"""The examples in the docstrings."""

import doctest
from types import ModuleType

import pytest

from xbm_app.models import bn_inception, embedding, small


@pytest.mark.parametrize("module", [bn_inception, embedding, small], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
