"""Every notebook of examples/ runs from top to bottom, offline, and what is committed names no machine."""

import re
import time
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
LIMIT = 240  # seconds for a cell


def test_there_are_notebooks():
    assert {"plain_loop", "quickstart", "text_pairs"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_names_no_machine(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert not [cell.metadata for cell in notebook.cells if "execution" in cell.metadata]
    assert not re.search(r"/(home|root|Users|tmp)/", path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
        "IPYTHONDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    notebook, start = nbformat.read(path, as_version=4), time.monotonic()
    kernel = client.NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    kernel.execute()  # raises CellExecutionError, with the cell and its traceback
    print(f"{path.name}: {time.monotonic() - start:.0f} s")
    printed = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed, "a notebook shows something"
    assert not [output for output in printed if output.output_type == "error"]
    if path.stem == "quickstart":
        check_quickstart("\n".join(map(str, printed)), tmp_path)


def check_quickstart(printed: str, folder: Path) -> None:
    assert "TrainedRun runs/shapes" in printed and "100 training images of 10 classes" in printed
    assert "100/100 · " in printed and "<progress" in printed, "the progress is one line that is replaced"
    recall = re.search(r"R@1 (\d\.\d+)", printed)
    assert recall is not None and float(recall[1]) > 0.3, "chance is 0.09"
    assert "(True, ['README.md', 'checksums.json', 'config.json', 'model.safetensors'])" in printed
    assert "image/png" in printed and (folder / "runs" / "shapes" / "report.html").exists()
    assert "stderr" not in printed, "a notebook shows in red what is on stderr"
