"""Every Python block of the README runs, one after the other, as a reader would type them."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_blocks_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, "the README shows how to use the library"
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        before = text[: block.start(1)].count("\n")  # so that a traceback names the README's own line
        exec(compile("\n" * before + block.group(1), str(README), "exec"), namespace)


def test_the_three_lines_of_the_memory_are_among_them():
    shown = "\n".join(block.group(1) for block in BLOCK.finditer(README.read_text()))
    for line in ("CrossBatchMemory(", ".enqueue(", "loss_fn("):
        assert line in shown, f"the README's example lacks {line}"
