import json
import math
from dataclasses import replace

import pytest

from tests.tiny import xbm
from xbm.errors import InputError
from xbm_app.cli import demo
from xbm_app.cli.demo import ARMS, MARK, Arm, config_of, next_steps, run_demo, summary
from xbm_app.report.groups import mean_and_error
from xbm_app.train.config import flat


def test_mean_and_standard_error_by_hand():
    mean, error = mean_and_error([1.0, 2.0, 6.0])
    assert mean == 3.0 and error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    mean, error = mean_and_error([0.7])
    assert mean == 0.7 and math.isnan(error)


def runs(**scores):
    names = {"base": "contrastive", "memory": "contrastive + memory", "ms": "MS"}
    return [{"name": names[key], "seed": seed, "recall@1": v} for key, values in scores.items() for seed, v in values.items()]


def test_gains_are_taken_seed_by_seed():
    rows = summary(runs(memory={2: 0.58, 0: 0.50, 1: 0.57}, base={0: 0.45, 1: 0.50, 2: 0.55}))
    base, memory = rows
    assert (base["name"], base["seeds"], base["mean"]) == ("contrastive", 3, pytest.approx(0.50)) and "gain" not in base
    assert base["error"] == pytest.approx(0.05 / math.sqrt(3))
    assert memory["name"] == "contrastive + memory" and memory["mean"] == pytest.approx(0.55)
    # 0.05, 0.07, 0.03: paired, the spread of the seeds cancels
    assert memory["gain"] == pytest.approx(0.05) and memory["gain_error"] == pytest.approx(0.02 / math.sqrt(3))


def test_only_seeds_that_both_have_are_paired():
    _, memory = summary(runs(base={0: 0.5, 1: 0.6}, memory={1: 0.7, 2: 0.9}))
    assert memory["mean"] == pytest.approx(0.8) and memory["gain"] == pytest.approx(0.1) and math.isnan(memory["gain_error"])


def test_arms_that_did_not_run_are_left_out():
    assert [row["name"] for row in summary(runs(ms={0: 0.4}))] == ["MS"]
    assert "gain" not in summary(runs(memory={0: 0.4}))[0]  # nothing to compare with


def test_no_shared_seed_no_gain():
    assert "gain" not in summary(runs(base={0: 0.5}, memory={1: 0.7}))[1]


def test_another_figure_can_be_summed_up():
    (row,) = summary([{"name": "MS", "seed": 0, "recall@1": 0.1, "map@r": 0.3}], key="map@r")
    assert row["mean"] == 0.3


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.memory], ids=lambda arm: arm.name)
def test_with_and_without_memory_differ_in_what_the_recipe_says_of_it(arm):
    (base,) = [other for other in ARMS if other.name == arm.name.removesuffix(" + memory")]
    one, other = flat(config_of(arm, seed=2)), flat(config_of(base, seed=2))
    told = {"recipe", "memory.ratio", "memory.start", "memory.fill"}
    told |= set() if "summed" in arm.name else {"memory.reduction", "loss.reduction"}
    assert {name for name in one if one[name] != other[name]} == told
    assert other["memory.ratio"] == 0 and one["seed"] == 2 and one["device"] == "cpu" and one["data.name"] == "glyphs"
    assert (one["memory.reduction"] or one["loss.reduction"]) == arm.reduction and one["recipe"] == "auto"


def test_there_is_a_baseline_and_a_memory_for_contrastive_and_ms():
    assert {(arm.loss, arm.memory) for arm in ARMS} >= {
        (loss, memory) for loss in ("contrastive", "ms") for memory in (True, False)
    }
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_shorter_runs_decay_earlier():
    config = config_of(ARMS[0], 0, iterations=50)
    assert config.optim.iterations == 50 and config.optim.decay_at == (40,)


def test_only_an_earlier_demo_is_replaced(tmp_path):
    out = tmp_path / "out"
    demo._clear(out)
    (out / "contrastive_seed0").mkdir()
    demo._clear(out)
    assert [path.name for path in out.iterdir()] == [MARK]
    other = tmp_path / "home"
    other.mkdir()
    demo._clear(other)  # empty: nothing to lose
    (other / MARK).unlink()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="not the folder of an earlier demo"):
        demo._clear(other)
    with pytest.raises(InputError, match="not the folder of an earlier demo"):
        demo._clear(other / "letter.txt")
    assert (other / "letter.txt").read_text() == "dear"


def test_the_work_is_shared_out_by_seed(tmp_path, monkeypatch):
    """Every arm with every seed, fewer where an arm says so, sorted by arm in the end."""
    asked = []

    def side_by_side(work, out, iterations):
        asked.extend((arm.name, seed) for arm, seed in work)
        for arm, seed in reversed(work):
            yield {"name": arm.name, "seed": seed, "recall@1": 0.5}

    monkeypatch.setattr(demo, "_side_by_side", side_by_side)
    monkeypatch.setattr(demo, "ARMS", (Arm("a", "ms", False), Arm("b", "ms", True, seeds=1)))
    monkeypatch.setattr("xbm_app.data.glyphs.read_glyphs", lambda size: replace_glyphs())
    said = []
    found = run_demo(tmp_path / "out", seeds=2, iterations=7, say=said.append)
    assert asked == [("a", 0), ("b", 0), ("a", 1)]
    assert [(run["name"], run["seed"]) for run in found] == [("a", 0), ("a", 1), ("b", 0)]
    assert said[-1].startswith("3/3 · a, seed 0: R@1 50.0")


def replace_glyphs():
    import numpy as np

    from xbm_app.data.images import Dataset, ImageSet, Protocol

    images = ImageSet("glyphs", np.array([0, 1]), ["a", "b"], pixels=np.zeros((2, 4, 4), np.uint8))
    return Dataset("glyphs", images, (Protocol("test", images, (1,)),))


@pytest.mark.slow
def test_a_demo_from_beginning_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XBM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "ARMS", tuple(replace(arm, seeds=1) for arm in ARMS[:2]))
    found = run_demo(tmp_path / "out", seeds=2, iterations=12, say=lambda text: None)
    assert [(run["name"], run["loss"], run["memory"], run["seed"]) for run in found] == [
        ("contrastive", "contrastive", False, 0),
        ("contrastive + memory", "contrastive", True, 0),
    ]
    for run in found:
        assert 0 < run["recall@1"] < 1 and run["seconds"] > 0 and run["iterations"] == 12 and run["notes"] == []
        assert json.loads((tmp_path / "out" / run["folder"].split("/")[-1] / "result.json").read_text())["seed"] == 0
    assert json.dumps(found)  # every figure can be written down
    assert [row["seeds"] for row in summary(found)] == [1, 1]


def test_the_next_steps_search_with_the_best_run_and_compare_it_with_its_baseline(tmp_path):
    (tmp_path / "glyphs" / "A").mkdir(parents=True)
    (tmp_path / "glyphs" / "A" / "0.png").touch()
    made = [
        {"name": name, "seed": seed, "recall@1": score, "folder": f"{name}{seed}"}
        for name, seed, score in [("MS", 0, 0.5), ("MS", 1, 0.6), ("MS + memory", 0, 0.7), ("MS + memory", 1, 0.8)]
    ]
    images = str(tmp_path / "glyphs")
    assert next_steps(made, tmp_path) == [
        ("index", "MS + memory1", images),
        ("search", "MS + memory1", f"{images}/A/0.png"),
        ("serve", "MS + memory1"),
        ("index", "MS1", images),
        ("serve", "MS + memory1", "MS1"),
    ]
    assert len(next_steps(made[:1], tmp_path)) == 3


SCORES = [
    ("contrastive", False, 0, 0.5),
    ("contrastive", False, 1, 0.52),
    ("contrastive + memory", True, 0, 0.56),
    ("contrastive + memory", True, 1, 0.60),
    ("MS", False, 0, 0.4),
]
RUNS = [
    {"name": name, "loss": "contrastive", "memory": memory, "seed": seed, "recall@1": recall, "seconds": 1.0, "folder": f"f{k}"}
    for k, (name, memory, seed, recall) in enumerate(SCORES)
]


def test_the_table_the_figures_and_the_page(tmp_path, monkeypatch):
    asked = {}

    def run_demo(out, seeds, iterations, say):
        asked.update(out=out, seeds=seeds, iterations=iterations)
        say("as if it had trained")
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
    assert code == 2 and "not the folder of an earlier demo" in err and (tmp_path / "thesis.tex").exists()


def test_numbers_that_show_nothing_are_refused(tmp_path):
    assert xbm("demo", "--out", tmp_path / "d", "--seeds", 0).code == 2
    assert not (tmp_path / "d").exists()
