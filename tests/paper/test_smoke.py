import pytest
import torch

from paper.experiments import ALL, DOCUMENTS, RESULTS
from paper.page import write_page
from paper.plan import plan
from paper.record import Records
from paper.smoke import GLYPHS, run_smoke
from paper.work import execute


def test_the_plan_of_the_smoke_covers_every_experiment_in_miniature(tmp_path):
    for experiment in ALL.values():
        now = plan([experiment], [GLYPHS], 1, Records(tmp_path))
        assert now.ready, experiment.name
        assert all(task.config.optim.iterations < 50 and task.config.data.name == "glyphs" for task in now.ready)


def test_one_experiment_of_it_from_plan_to_page(tmp_path):
    """In this process; the whole is a slow test."""
    torch.set_num_threads(1)
    records = Records(tmp_path / "results")
    for task in plan([ALL["drift"]], [GLYPHS], 1, records).ready:
        execute(task, task.config, tmp_path / "runs", records)
    text = write_page(records, RESULTS, tmp_path, mini=True).read_text()
    assert len(records) == 2 and "(figures/drift_glyphs_small.svg)" in text
    assert (tmp_path / "figures" / "drift_glyphs_small.svg").exists()


@pytest.mark.slow
def test_smoke(tmp_path):
    """Every experiment from its plan to its place on the page."""
    outcome = run_smoke(tmp_path)
    assert not outcome.failed and outcome.left == 0 and outcome.finished > 50
    assert {name for document in DOCUMENTS for name in document.experiments} == ALL.keys()
    pages = [((tmp_path / document.name).read_text(), document.experiments) for document in DOCUMENTS]
    for text, experiment in [(text, each) for text, of in pages for each in of.values()]:
        section = text.split(f"## {experiment.title}\n")[1].split("\n## ")[0]
        assert "### glyphs" in section and "small" in section, experiment.name
    figures = {path.name.split("_")[0] for path in (tmp_path / "figures").iterdir()}
    assert figures >= {"figure-1", "batch-size", "drift", "lemma-1", "valid-negatives", "ms-outliers", "retrieved-fails"}
    assert run_smoke(tmp_path).finished == 0  # all there
