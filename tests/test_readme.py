"""Every Python block of the README and of docs/pairs.md runs, one after the other, as a reader would type them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "pairs.md"], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, "the page shows how to use the library"
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        before = text[: block.start(1)].count("\n")  # so that a traceback names the page's own line
        exec(compile("\n" * before + block.group(1), str(page), "exec"), namespace)


def test_pairs_are_on_the_first_screen():
    assert "(docs/pairs.md)" in "".join(README.read_text().splitlines(keepends=True)[:42])


def test_the_three_lines_of_the_memory_are_among_them():
    shown = "\n".join(block.group(1) for block in BLOCK.finditer(README.read_text()))
    for line in ("CrossBatchMemory(", ".enqueue(", "loss_fn("):
        assert line in shown, f"the README's example lacks {line}"


def test_the_comparison_is_that_of_its_page():
    block = re.compile(r"<!-- short comparison -->.*<!-- end of short comparison -->", re.DOTALL)
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert block.search(README.read_text())[0] == block.search(page)[0]
