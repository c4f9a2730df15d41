"""The threat model: every test that it names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())


def test_every_promise_names_a_test_and_every_test_is_there():
    tests = {path: ast.parse((ROOT / path).read_text()) for path, _ in NAMED}
    names = {path: {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} for path, tree in tests.items()}
    assert len(NAMED) > 20 and [(path, name) for path, name in NAMED if name not in names[path]] == []
    rows = re.findall(r"^\| (?!\| test)(.*) \|$", (ROOT / "docs" / "security.md").read_text(), re.M)
    assert len(rows) > 20 and [row for row in rows if "::test_" not in row] == []
