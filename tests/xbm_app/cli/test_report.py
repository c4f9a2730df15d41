import json
import shutil

import pytest

from tests.tiny import tiny_config, xbm
from xbm_app.train.loop import train


@pytest.fixture(scope="module")
def without(own_photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without") / "baseline"
    train(tiny_config(own_photos, memory__ratio=0.0), folder, quiet=True)
    return folder


def test_a_page_about_a_run(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    code, out, err = xbm("report", run)
    assert code == 0 and out.strip() == str(run / "report.html"), err
    page = (run / "report.html").read_text()
    assert page.count("data:image") > 20 and "https://" not in page.split("<body")[1].split("xmlns")[0]
    code, out, _ = xbm("report", run, "--out", tmp_path / "deep" / "page.html")
    assert code == 0 and (tmp_path / "deep" / "page.html").exists()


def test_runs_side_by_side(finished, without, tmp_path):
    code, out, err = xbm("compare", without, finished, "--out", tmp_path / "both.html")
    assert code == 0 and out.splitlines()[-1] == str(tmp_path / "both.html"), err
    for run in (without, finished):
        row = next(line for line in out.splitlines() if f" {run.name} " in line)
        result = json.loads((run / "result.json").read_text())
        assert f"{100 * result['recall@1']:.2f}" in row and f"{100 * result['map@r']:.2f}" in row
    assert "no memory" in (tmp_path / "both.html").read_text()


def test_a_run_may_be_compared_with_itself(finished, tmp_path):
    assert xbm("compare", finished, finished, "--out", tmp_path / "same.html").code == 0


def test_runs_that_are_not_finished_are_refused(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "result.json").unlink()
    for words in (("report", run), ("compare", finished, run)):
        code, _, err = xbm(*words)
        assert code == 2 and err == f"error: {run} holds no finished run: finish it with `xbm train --resume {run}`\n"
    code, _, err = xbm("report", tmp_path / "none")
    assert code == 2 and "does not exist: pass a run folder" in err


def test_the_drift_of_a_finished_run(own_photos, tmp_path):
    train(tiny_config(own_photos, optim__iterations=22), tmp_path / "run", quiet=True)
    code, out, err = xbm("drift", tmp_path / "run", "--out", tmp_path / "d.svg", "--json", tmp_path / "d.json")
    assert code == 0, err
    assert "Δt" in out and out.splitlines()[-1] == str(tmp_path / "d.svg") and (tmp_path / "d.svg").exists()
    (curves,) = json.loads((tmp_path / "d.json").read_text()).values()
    assert curves["10"]["step"] and all(value > 0 for value in curves["10"]["drift"])


def test_a_folder_without_a_run(tmp_path):
    code, _, err = xbm("drift", tmp_path)
    assert code == 2 and "does not exist" in err


def test_the_figure_is_an_svg(tmp_path):
    code, _, err = xbm("drift", tmp_path, "--out", tmp_path / "d.png")
    assert code == 2 and "d.png must end in .svg" in err
