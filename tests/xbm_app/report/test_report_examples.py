import doctest

import pytest

from xbm_app.report import charts, groups, markup, page, scales


@pytest.mark.parametrize("module", [charts, groups, markup, page, scales], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
