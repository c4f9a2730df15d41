"""What docs/python.md shows exists: the arguments of its calls, the settings that it names, the notebook."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import xbm
from xbm_app.train.config import Config, flat, override

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CALLS = [node for block in BLOCKS for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]


def test_the_arguments_of_every_call_exist():
    calls = [call for call in CALLS if ast.unparse(call.func) == "xbm.train"]
    parameters = inspect.signature(xbm.train).parameters
    used = {argument.arg for call in calls for argument in call.keywords}
    assert len(calls) == 4 and {"transform", "on_log", "on_evaluate", "set", "out"} <= used <= parameters.keys()
    for call in calls:
        for argument in call.keywords:
            if argument.arg == "set":
                override(Config(), ast.literal_eval(argument.value))


def test_every_setting_that_it_names_exists():
    named = set(re.findall(r"`((?:data|optim|batch|model|log|memory|loss)\.\w+)", PAGE))
    assert len(named) > 12 and named <= flat(Config()).keys()


@pytest.mark.parametrize("name", ["load", "from_pretrained", "train"])
def test_the_names_are_at_hand(name):
    assert name in dir(xbm) and f"xbm.{name}" in PAGE and name not in xbm.__all__
