"""Reads our docstrings as griffe expects them: `Example:` is a section of examples."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
