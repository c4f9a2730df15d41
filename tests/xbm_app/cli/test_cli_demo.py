import json

from tests.tiny import xbm
from xbm_app import demo

ARMS = [
    ("contrastive", False, 0, 0.5),
    ("contrastive", False, 1, 0.52),
    ("contrastive + memory", True, 0, 0.56),
    ("contrastive + memory", True, 1, 0.60),
    ("MS", False, 0, 0.4),
]
RUNS = [
    {"name": name, "loss": "contrastive", "memory": memory, "seed": seed, "recall@1": recall, "seconds": 1.0, "folder": f"f{k}"}
    for k, (name, memory, seed, recall) in enumerate(ARMS)
]


def test_the_table_the_figures_and_the_page(tmp_path, monkeypatch):
    asked = {}

    def run_demo(out, seeds, iterations, tell):
        asked.update(out=out, seeds=seeds, iterations=iterations)
        tell("as if it had trained")
        return RUNS

    def report_runs(folders, out, groups):
        asked.update(folders=[folder.name for folder in folders], groups=groups)
        return out

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr("xbm_app.report.run_folders.report_runs", report_runs)
    code, out, err = xbm("demo", "--out", tmp_path / "d", "--seeds", 2, "--json", tmp_path / "new" / "figures.json")
    assert code == 0, err
    assert asked == {
        "out": tmp_path / "d", "seeds": 2, "iterations": demo.ITERATIONS, "folders": ["f0", "f1", "f2", "f3", "f4"],
        "groups": [run["name"] for run in RUNS],
    }  # fmt: skip
    row = next(line for line in out.splitlines() if "contrastive + memory" in line)
    assert "58.0" in row and "+7.0 ± 1.0" in row and " 2 " in row
    assert "nan" not in out  # a single seed has no standard error
    figures = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert figures["runs"] == RUNS and figures["seconds"] >= 0
    assert out.splitlines()[-1] == str(tmp_path / "d" / "report.html")
    assert f"  xbm index f3 {tmp_path / 'd' / 'glyphs'}\n" in out and "  xbm serve f3\n" in out


def test_a_folder_of_something_else_is_not_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = xbm("demo", "--out", tmp_path)
    assert code == 2 and "is not the folder of an earlier demo" in err and (tmp_path / "thesis.tex").exists()


def test_numbers_that_show_nothing_are_refused(tmp_path):
    assert xbm("demo", "--out", tmp_path / "d", "--seeds", 0).code == 2
    assert not (tmp_path / "d").exists()
