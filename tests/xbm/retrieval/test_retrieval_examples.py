import doctest

import pytest

from xbm.retrieval import copies, metrics, neighbours, same_key


@pytest.mark.parametrize("module", [copies, metrics, neighbours, same_key], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
