"""Every Python block of the README runs, one after the other, as a reader would type them; its figures are the page's."""

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


def test_the_readme_quotes_the_page_about_robustness():
    page = (README.parent / "docs" / "robustness.md").read_text()
    words = " ".join(README.read_text().split())
    gains = re.findall(r"`auto` is ([+−][\d.]+) ± ([\d.]+) points from no memory.*\(\[robustness\]", page)
    measured = [(float(gain.replace("−", "-")), float(error)) for gain, error in gains]
    ahead = [gain for gain, error in measured if gain > error]
    behind = [gain for gain, error in measured if gain < -error]
    assert (len(measured), len(ahead), len(behind)) == (12, 10, 1)
    assert f"{-behind[0]} points behind training without memory" in words
    assert f"the other ten of twelve settings it is ahead, by {min(ahead)} to {max(ahead)} points" in words
    noisy = re.findall(r"`auto` is \+([\d.]+) ± ([\d.]+) points.*\(\[robustness-noise\]", page)
    assert (
        len(noisy) == 10
        and all(float(gain) > float(error) for gain, error in noisy)
        and "ahead with 10 % wrong labels in the ten settings" in words
    )
    more = [float(found) for found in re.findall(r"ms \| ([+−][\d.]+) % \(", page)]
    assert len(more) == 3 and f"costs {min(more)} to {max(more)} % more than with a plain queue" in words
    of_glyphs = page.split("## Every recipe")[1].split("### glyphs")[1]
    without, paper = re.search(r"\| small, contrastive \| (\S+) ± \S+ \| (\S+) ±", of_glyphs).groups()
    assert f"from R@1 {without} to {paper} (glyphs, contrastive)" in words
