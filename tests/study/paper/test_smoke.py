import pytest

from xbm.study.paper.plan import plan
from xbm.study.paper.record import Records
from xbm.study.paper.registry import EXPERIMENTS
from xbm.study.paper.smoke import GLYPHS, run_smoke


def test_the_plan_of_the_smoke_covers_every_experiment_in_miniature(tmp_path):
    settings = GLYPHS.settings(mini=True)
    for experiment in EXPERIMENTS.values():
        now = plan([experiment], settings, 1, Records(tmp_path))
        assert now.ready, experiment.name
        assert all(task.config.optim.iterations < 50 and task.config.data.name == "glyphs" for task in now.ready)


@pytest.mark.slow
def test_smoke(tmp_path):
    """Every experiment from its plan to its place on the page."""
    outcome = run_smoke(tmp_path)
    assert not outcome.failed and outcome.left == 0 and outcome.made > 50
    text = (tmp_path / "results.md").read_text()
    for experiment in EXPERIMENTS.values():
        section = text.split(f"## {experiment.title}\n")[1].split("\n## ")[0]
        assert "### glyphs" in section and "small" in section, experiment.name
    figures = {path.name.split("_")[0] for path in (tmp_path / "figures").iterdir()}
    assert figures >= {"figure-1", "batch-size", "drift", "lemma-1", "valid-negatives", "ms-outliers", "retrieved-fails"}
    assert run_smoke(tmp_path).made == 0  # all there
