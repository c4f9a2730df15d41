import json
import subprocess
import sys

import pytest
import torch

from paper import __main__ as paper_main
from paper import workers
from paper.__main__ import machine_of, run_smoke
from paper.experiment import GLYPHS, Setting, base
from paper.experiments import ALL, DOCUMENTS, RESULTS
from paper.page import PRIVATE, write_page
from paper.record import Records, identity
from paper.study import plan
from paper.workers import Outcome, execute
from tests.tiny import paper
from xbm.errors import InputError
from xbm_app.train.presets import preset

ABOUT = {"date": "2026-01-31", "device": "cpu", "precision": "fp32"}


@pytest.fixture
def asked(monkeypatch):
    """What would have been run."""
    requested = {}

    def run_all(planned, place, records, runs, jobs=1, budget=float("inf"), tell=print):
        requested.update(plan=planned(), place=place, records=records, runs=runs, jobs=jobs, budget=budget)
        return requested.get("outcome", Outcome(0, {}, 0))

    monkeypatch.setattr(workers, "run_all", run_all)
    return requested


def test_the_list_names_every_experiment(tmp_path):
    code, out, err = paper("--results", tmp_path)
    assert code == 0, err
    assert all(name in out for name in ("table-1", "s-table-7", "figure-1", "lemma-1", "smoke")) and "Table 2" in out


def test_run_passes_on_what_it_is_told(asked, tmp_path):
    (tmp_path / "cars").mkdir()
    words = ("run", "s-table-3", "--data", f"cars={tmp_path / 'cars'}", "--trunk", "efficientnet_lite0", "--seeds", 2)
    code, out, err = paper(*words, "--jobs", 3, "--budget", 500, "--results", tmp_path / "r", "--runs", tmp_path / "runs")
    assert code == 0, err
    assert len(asked["plan"].ready) == 18 and asked["plan"].waiting == 12  # six rows, three rates, two seeds
    assert (asked["jobs"], asked["budget"], asked["runs"], asked["records"].folder) == (
        3,
        500,
        tmp_path / "runs",
        tmp_path / "r",
    )
    assert asked["place"](asked["plan"].ready[0].config).data.root == str(tmp_path / "cars")
    assert "0 runs are finished, 18 can start, 12 wait for a learning rate" in out


def test_a_run_that_failed_ends_in_a_sentence(asked, tmp_path):
    asked["outcome"] = Outcome(1, {"k": "glyphs_small: no luck"}, 0)
    code, _, err = paper("run", "drift", "--data", "glyphs", "--results", tmp_path)
    assert code == 2 and "1 runs failed; the first: glyphs_small: no luck" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [(("tabel-1", "--data", "glyphs"), "did you mean 'table-1'"), (("table-1",), "no data given")],
)
def test_mistakes_end_in_a_sentence(asked, words, message):
    code, _, err = paper("run", *words)
    assert code == 2 and message in err


def test_an_experiment_that_says_nothing_about_the_data_is_told(asked, tmp_path):
    code, _, err = paper("run", "table-1", "--data", "glyphs", "--results", tmp_path)
    assert code == 2 and "table-1: not defined for this data" in err


def test_a_report_of_nothing_leaves_what_was_written(tmp_path):
    code, _, err = paper("report", "--results", tmp_path / "r", "--out", tmp_path / "docs")
    assert code == 2 and "contains no results" in err and not (tmp_path / "docs").exists()


def test_the_report_is_written(tmp_path):
    Records(tmp_path / "r").write({"config": identity(preset("sop")), "failed": "iteration 3", **ABOUT})
    code, out, err = paper("report", "--results", tmp_path / "r", "--out", tmp_path / "docs")
    assert code == 0, err
    pages = [tmp_path / "docs" / name for name in ("results.md", "s-table-3.md", "robustness.md", "claims.md")]
    assert out.split() == [str(page) for page in pages] and all("not run" in page.read_text() for page in pages)
    code, again, err = paper("report", "--results", tmp_path / "r", "--out", tmp_path / "docs", "--data", "glyphs")
    assert code == 0 and again == out, err


def test_the_report_says_where_photographs_are_that_no_page_may_show(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_main, "read_datasets", lambda data: {"cars": None})
    Records(tmp_path / "r").write({"config": identity(preset("sop")), "failed": "iteration 3", **ABOUT})
    code, out, err = paper("report", "--results", tmp_path / "r", "--out", tmp_path / "docs", "--data", "cars=DIR")
    assert code == 0 and out.split()[-1] == str(PRIVATE), err


@pytest.mark.parametrize("name", ["run", "report"])
def test_help_shows_an_example(name):
    code, out, _ = paper(name, "--help")
    assert code == 0 and "Example" in out and f"python -m paper {name}" in out.replace("\n", " ")


def test_a_machine_without_pyarrow_and_faiss_can_run_experiments():
    """What trains and scores must not ask for what only other commands need."""
    script = """
import sys
for name in ("pyarrow", "faiss"):
    sys.modules[name] = None  # an import of it fails
import paper.__main__, paper.experiments, paper.page, paper.workers
import xbm_app.data.glyphs, xbm_app.train.loop, xbm_app.data.store, xbm_app.data.benchmarks
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture
def places(tmp_path):
    (tmp_path / "cars").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "dataset.json").write_text("{}")
    (tmp_path / "w.safetensors").touch()
    return tmp_path


def test_every_data_set_with_every_trunk(places):
    weights = places / "w.safetensors"
    machine = machine_of([f"cars={places / 'cars'}", "glyphs"], ["efficientnet_lite0", f"resnet50_v1={weights}"])
    assert machine.settings() == [
        Setting("cars", "efficientnet_lite0", "imagenet"),
        Setting("cars", "resnet50_v1", "w.safetensors"),
        Setting("glyphs", "small", "none"),
    ]
    assert machine_of([f"cars={places / 'cars'}"], []).settings() == [Setting("cars", "googlenet", "imagenet")]


def test_paths_go_into_the_config_of_a_run_and_a_store_is_told_from_images(places):
    machine = machine_of([f"cars={places / 'cars'}"], [f"resnet50_v1={places / 'w.safetensors'}"])
    placed = machine.place(base(machine.settings()[0]))
    assert placed.data.root == str(places / "cars") and placed.data.store is None
    assert placed.model.weights == str(places / "w.safetensors")
    stored = machine_of([f"cars={places / 'store'}"], ["efficientnet_lite0"])
    placed = stored.place(base(stored.settings()[0]))
    assert placed.data.root is None and placed.data.store == str(places / "store") and placed.model.weights == "imagenet"
    glyphs = machine_of(["glyphs"], [])
    assert glyphs.place(base(glyphs.settings()[0])).data.root is None


@pytest.mark.parametrize(
    ("data", "trunks", "message"),
    [
        ([], [], "--data cars=DIR"),
        (["cars"], [], "write --data cars=DIR"),
        (["carz=x"], [], "did you mean 'cars'"),
        (["cars=/nowhere/at/all"], [], "there is no folder"),
        (["glyphs"], ["resnet50"], "leave out --trunk"),
        (["glyphs"], ["resnet50_v1=/nowhere.pth"], "there is no file"),
    ],
)
def test_mistakes_are_told_in_one_sentence(data, trunks, message):
    with pytest.raises(InputError, match=message):
        machine_of(data, trunks)


def test_labels_are_written_beside_the_results(tmp_path):
    code, out, err = paper("labels", "--data", "glyphs", "--results", tmp_path)
    assert code == 0, err
    kept = json.loads((tmp_path / "labels" / "glyphs.json").read_text())
    assert out.strip() == str(tmp_path / "labels" / "glyphs.json") and len({label for label, _ in kept["runs"]}) == 461
    assert sum(length for _, length in kept["runs"]) == kept["queries"]
    assert paper("labels", "--results", tmp_path).code == 2


# ------------------------------------------------------------------ all experiments in miniature


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
