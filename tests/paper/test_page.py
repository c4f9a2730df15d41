"""The page: made from the results and nothing else. The one under docs/ is what its results give."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from paper.experiment import Setting, setting_of
from paper.experiments import ALL, DOCUMENTS, EXPERIMENTS, RESULTS
from paper.page import (
    BREAK,
    FRAME,
    FRAMES,
    GAP,
    NO_DATA,
    PRIVATE,
    SIDE,
    TEXT,
    Claim,
    Table,
    Tile,
    draw_sheet,
    drawn_from,
    make_page,
    plus_minus,
    printed,
    settings_of,
    write_page,
)
from paper.record import Records
from paper.study import Spread, plan
from tests.paper.made_up import CARS, carry_out, invented
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.report import printed_figures
from xbm_app.report.writing import listed, percent, seeds

ROOT = Path(__file__).parents[2]
GLYPHS = setting_of("glyphs")
SOME = [EXPERIMENTS[name] for name in ("s-table-3", "mined", "lemma-1", "valid-negatives")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_the_page_in_the_documents_is_the_one_that_its_results_give(document):
    drawn = {path.stem for path in (ROOT / "docs" / "figures").glob("*.webp")}
    page = make_page(Records(ROOT / "paper" / "results"), document, lambda sheet: sheet.name in drawn)
    assert (ROOT / "docs" / document.name).read_text() == page.text, "run `python -m paper report`"
    for figure in page.figures:
        assert drawn_from(ROOT / "docs" / "figures" / f"{figure.name}.svg") == printed_figures.digest(figure.data), figure.name


@pytest.fixture
def records(tmp_path):
    records = Records(tmp_path / "results")
    carry_out(SOME, [CARS], 2, records)
    return records


def photographs(data: str) -> Dataset:
    images = ImageSet(f"{data} train", np.arange(10) % 2, ["a", "b"], pixels=np.zeros((10, 8, 8), np.uint8))
    return Dataset(data, images, (Protocol("test", images, (1,)),))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_runs_that_diverged_are_told_and_break_nothing(tmp_path, every):
    """All of them, the first of two, the first of three."""
    records, count = Records(tmp_path), 0
    while ready := plan(list(ALL.values()), [CARS, GLYPHS], 1, records).ready:
        for task in ready:
            values = invented(task)
            lost = {name: values.pop(name) for name in ("iterations", "data", "scores", "curves", "measures")}
            records.write(
                {**values, "failed": "iteration 3: the loss is not finite"} if count % every == 0 else {**values, **lost}
            )
            count += 1
    for document in DOCUMENTS:
        assert "cars" in make_page(records, document, lambda _: False).text


def test_without_results_everything_is_not_run_and_the_papers_figures_stay(tmp_path):
    page = make_page(Records(tmp_path), RESULTS, lambda _: False)
    for experiment in RESULTS.experiments.values():
        section = page.text.split(f"## {experiment.title}\n")[1].split("\n## ")[0]
        for data in experiment.data:
            assert re.search(rf"\b{data}\b[^.\n]*: {NO_DATA}\.", section), (experiment.name, data)
    assert "| contrastive w/ M | 80.3 | +7.8 |" in page.text and page.figures == [] and "In short" not in page.text


def test_with_results_ours_stand_beside_the_papers(records):
    text = make_page(records, RESULTS, lambda _: False).text
    assert "| contrastive w/ M | 80.3 | +7.8 | 61.1 ± 0.5 | +10.0 ± 0.0 |" in text
    images = "8,000 training images of 98 classes (of the release's 8,054)"
    assert f"- efficientnet_lite0, weights imagenet; {images}; 2,000 iterations; seeds 0, 1;" in text
    first = text.split("## In short")[1].split("\n## ")[0]
    assert "cars, efficientnet_lite0, contrastive: the memory adds +10.0" in first and "C = σ_max²" in first
    for link in re.findall(r"\(#([^)]+)\)", first):
        assert link in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.M)}


def test_figures_are_drawn_once_and_again_when_their_values_change(records, tmp_path):
    out = tmp_path / "docs"
    page = write_page(records, RESULTS, out)
    figures = {path.name: path.stat().st_mtime_ns for path in (out / "figures").iterdir()}
    assert "valid-negatives_cars.svg" in figures and page.read_text().count(".svg)") == len(figures)
    write_page(records, RESULTS, out)  # nothing is drawn
    assert {path.name: path.stat().st_mtime_ns for path in (out / "figures").iterdir()} == figures
    (out / "figures" / "valid-negatives_cars.svg").write_text("values 0000000000000000")
    write_page(records, RESULTS, out)
    assert "<svg" in (out / "figures" / "valid-negatives_cars.svg").read_text()


@pytest.mark.parametrize("data", ["glyphs", "omniglot"])
def test_photographs_need_their_data_set_and_stay_once_they_are_there(tmp_path, monkeypatch, data):
    monkeypatch.setattr(printed_figures, "save", lambda data, path: None)
    records, out, private = Records(tmp_path / "results"), tmp_path / "docs", tmp_path / "private"
    carry_out([EXPERIMENTS["mined"]], [setting_of(data)], 1, records)
    assert f"python -m paper report --data {data}=DIR` draws them." in write_page(records, RESULTS, out).read_text()
    page = write_page(records, RESULTS, out, {data: photographs(data)}, private=private).read_text()
    sheet = out / "figures" / f"mined-uniform_{data}_small.webp"
    assert sheet.exists() and f"(figures/{sheet.name})" in page and "are not in this repository" not in page
    assert write_page(records, RESULTS, out).read_text() == page and not private.exists()


def test_photographs_that_may_not_be_redistributed_are_drawn_beside_the_pages(records, tmp_path, monkeypatch):
    monkeypatch.setattr(printed_figures, "save", lambda data, path: None)
    out, private = tmp_path / "docs", tmp_path / "private"
    name = "mined-uniform_cars_efficientnet_lite0.webp"
    (out / "figures").mkdir(parents=True)
    (out / "figures" / name).touch()  # as an earlier version drew it: no page links to it
    page = write_page(records, RESULTS, out).read_text()
    (out / "figures" / name).unlink()
    assert "may not be redistributed" in page and "python -m paper report --data cars=DIR" in page and ".webp" not in page
    assert write_page(records, RESULTS, out, {"cars": photographs("cars")}, private=private).read_text() == page
    assert (private / name).exists() and not list(out.rglob("*.webp"))


def test_git_ignores_the_photographs_that_may_not_be_redistributed():
    assert f"{PRIVATE.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_every_photograph_in_the_documents_may_be_redistributed():
    records = Records(ROOT / "paper" / "results")
    sheets = [sheet for document in DOCUMENTS for sheet in make_page(records, document, lambda _: True).pictures]
    assert "cars" in {sheet.data for sheet in sheets if not sheet.public}
    public = {sheet.name for sheet in sheets if sheet.public}
    assert {path.stem for path in (ROOT / "docs" / "figures").glob("*.webp")} <= public


def test_one_thread_is_singular_in_older_results_too(tmp_path):
    records, devices = Records(tmp_path), ("cpu, 1 threads", "cpu, 1 thread", "cpu, 16 threads")
    while ready := plan([EXPERIMENTS["s-table-3"]], [GLYPHS], 3, records).ready:
        for task in ready:
            records.write({**invented(task), "device": devices[task.config.seed]})
    text = make_page(records, RESULTS, lambda _: False).text
    assert "runs, cpu, 1 thread, bf16 and cpu, 16 threads, bf16;" in text


def test_a_pretrained_trunks_runs_from_scratch_are_no_setting_of_their_own(records, tmp_path):
    assert any(record.config["model.weights"] == "none" for record in records)
    assert settings_of(records) == [CARS]
    more = Records(tmp_path / "more")
    carry_out([EXPERIMENTS["drift"]], [Setting("omniglot", "small", "none")], 1, more)
    assert settings_of(more) == [Setting("omniglot", "small", "none")]


def test_a_table_is_markdown():
    assert Table(["a", "b"], [["x", "1"]]).markdown() == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_figures_are_written_one_way():
    assert percent(0.6684) == "66.8" and percent(math.nan) == "–"
    assert printed(77.4) == "77.4" and printed(None) == "–"
    assert plus_minus(Spread({0: 0.5, 1: 0.52})) == "51.0 ± 1.0" and plus_minus(Spread({0: 0.5})) == "50.0"
    assert plus_minus(Spread({0: -0.05}), sign=True) == "−5.0" and plus_minus(Spread({0: 0.05}), sign=True) == "+5.0"
    assert plus_minus(Spread()) == "–"


def test_words():
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert seeds(1) == "one seed" and seeds(3) == "3 seeds" and Claim("x") == "x"


def one(name: str, grey: int) -> ImageSet:
    return ImageSet(name, np.array([0]), ["a"], pixels=np.full((1, 8, 8), grey, np.uint8))


def test_every_picture_is_at_its_place_in_its_frame():
    sets = [one(name, grey) for name, grey in (("x train", 40), ("x query", 120), ("x gallery", 200))]
    dataset = Dataset("x", sets[0], (Protocol("test", sets[1], (1,), sets[2]),))
    rows = [[Tile("train", 0, "anchor", "anchor")], [], [Tile("query", 0, "wrong", ""), Tile("gallery", 0, "right", "0.50")]]
    sheet = draw_sheet(rows, dataset)
    wide, high = SIDE + 2 * FRAME + GAP, SIDE + 2 * FRAME + TEXT + GAP
    assert sheet.size == (2 * wide + GAP, 2 * high + GAP + BREAK)

    def at(row, column, inside):
        return sheet.getpixel((GAP + column * wide + inside, GAP + row * (high + BREAK) + inside))

    middle = FRAME + SIDE // 2
    assert at(0, 0, middle) == (40,) * 3 and at(1, 0, middle) == (120,) * 3 and at(1, 1, middle) == (200,) * 3
    assert at(0, 1, middle) == (255,) * 3  # no tile
    for row, column, frame in ((0, 0, "anchor"), (1, 0, "wrong"), (1, 1, "right")):
        assert "#{:02x}{:02x}{:02x}".format(*at(row, column, 1)) == FRAMES[frame]


def test_without_a_gallery_the_queries_are_searched():
    dataset = Dataset("x", one("x train", 1), (Protocol("test", one("x test", 77), (1,)),))
    sheet = draw_sheet([[Tile("gallery", 0, "right", "")]], dataset)
    assert sheet.getpixel((GAP + FRAME + 5, GAP + FRAME + 5)) == (77,) * 3
