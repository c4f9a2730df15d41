"""The notebook runs from an empty folder to a model that is shared, as a reader would run it."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
nbformat = pytest.importorskip("nbformat")


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow  # a kernel starts and trains, which takes half a minute
def test_the_notebook_runs(tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = ["\n".join(str(output) for output in cell.get("outputs", [])) for cell in notebook.cells]
    text = "\n".join(shown)
    assert "TrainedRun runs/shapes" in text and "100 training images of 10 classes" in text
    assert "100/100 · " in text and "<progress" in text, "the progress is one line that is replaced"
    recall = float(re.search(r"R@1 (\d\.\d+)", text)[1])
    assert recall > 0.3, "chance is 0.09"
    assert "(True, ['README.md', 'checksums.json', 'config.json', 'model.safetensors'])" in text
    assert "image/png" in text and (tmp_path / "runs" / "shapes" / "report.html").exists()
    assert "stderr" not in text, "what is on stderr is shown in red"
