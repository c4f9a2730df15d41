import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.xbm_app.report.synthetic_runs import demo, run
from xbm.errors import InputError
from xbm_app.report import page as pages
from xbm_app.report.groups import Match, Query, RunView, Trace
from xbm_app.report.page import write_report


class Outline(HTMLParser):
    """Sections, links, tags and text of a page; fails on tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.ids, self.words = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    path = write_report(demo(pictures=6), tmp_path_factory.mktemp("report") / "deep" / "report.html", "Demo")
    return path.read_text(encoding="utf-8")


def outline_of(runs, tmp_path):
    return Outline(write_report(runs, tmp_path / "r.html", "T").read_text(encoding="utf-8"))


def test_the_page_fetches_nothing(full):
    page = Outline(full)
    assert page.links and all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"https?://|url\(|@import", full)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_sections_stand_in_order(full):
    order = [
        "results",
        "notes",
        "recall",
        "seeds",
        "training",
        "negatives",
        "drift",
        "retrieval",
        "mining",
        "labels",
        "cost",
        "reproduce",
    ]
    assert [i for i in Outline(full).ids if i not in ("check", "cross")] == order


def test_every_group_and_figure_is_in_the_table(full):
    table = full[full.index("<table") : full.index("</table>")]
    heads = re.findall(r'<th scope="col">([^<]*)', table)
    assert heads == ["setting", "seeds", "R@1", "R@2", "R@4", "R@8", "MAP@R", "time"]
    assert len(re.findall(r'<th scope="row">', table)) == 6
    assert len(re.findall(r"± ", table)) >= 6 * 5


def test_the_collapse_of_the_sum_is_explained(full):
    assert "Why the sum collapses and the mean does not (contrastive)" in full


def test_a_note_that_several_runs_made_is_printed_once(full):
    assert full.count("Embeddings are collapsing") == 1
    assert "contrastive, sum, with memory, seeds 0, 1, 2" in full


def test_every_picture_has_a_text_and_every_chart_a_summary(full):
    assert all(' alt="' in image and ' alt=""' not in image for image in re.findall("<img[^>]*>", full))
    assert len(re.findall('role="img" aria-label="[^"]', full)) == full.count('role="img"') > 10


def test_how_queries_were_chosen_is_said_and_too_many_are_thinned_out_evenly(tmp_path):
    picture = np.zeros((4, 4), np.uint8)
    queries = [Query(f"number {i}!", picture, [Match(picture, 0.5, True)]) for i in range(60)]
    pair = [replace(run("a", m, 0, 0.6, pictures=0), queries=queries, chosen="By lot.") for m in (False, True)]
    text = write_report(pair, tmp_path / "r.html", "T").read_text(encoding="utf-8")
    shown = [int(i) for i in re.findall(r"query number (\d+)!", text)]
    assert "By lot." in text and len(shown) == 24 and shown[0] == 0 and shown[-1] >= 55 and shown == sorted(set(shown))


def test_a_single_run_is_shown_without_comparisons(tmp_path):
    page = outline_of([run("contrastive", True, 0, 0.7, pictures=2)], tmp_path)
    words = " ".join(page.words)
    assert "without" not in words and "seeds" not in page.ids
    assert {"results", "recall", "training", "negatives", "drift", "retrieval", "mining", "reproduce"} <= set(page.ids)


def test_a_run_that_measured_nothing_still_has_a_page(tmp_path):
    page = outline_of([RunView("r", "g", "MS", False, 0)], tmp_path)
    assert "No run has a result yet." in page.words


def test_what_comes_from_data_never_becomes_markup(tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror="alert(2)">&'
    picture = np.zeros((8, 8), np.uint8)
    made = RunView(
        name=evil,
        group=evil,
        loss=evil,
        memory=True,
        seed=0,
        reduction=evil,
        recall={"recall@1": 0.5, evil: 0.1},
        curve=[0.5, 0.6],
        seconds=1.0,
        iterations=10,
        trace=Trace(step=np.arange(10), loss=np.arange(10.0)),
        queries=[Query(evil, picture, [Match(picture, 0.5, True)])],
        notes=[("error", evil)],
        data=evil,
        config={evil: evil},
        command=evil,
        versions={evil: evil},
    )
    baseline = replace(made, group=f"{evil} 0", memory=False, config={evil: "other"})
    path = write_report([made, baseline], tmp_path / "r.html", evil)
    text = path.read_text(encoding="utf-8")
    page = Outline(text)
    assert page.tags.count("script") == 1 and "alert(1)" not in text[text.rindex("<script>") :]
    assert "onerror" in text and not re.search(r"<[^>\"]*onerror", text)
    assert page.tags.count("img") == 3


def test_names_that_are_not_text_are_replaced(tmp_path):
    assert "r\\udcff" not in write_report([RunView("r", "g\udcff", "MS", True, 0)], tmp_path / "r.html", "T").read_text("utf-8")


def test_pictures_shrink_until_the_page_is_small_enough(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    noisy = [Match(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8), 0.5, True) for _ in range(8)]
    made = replace(
        run("contrastive", True, 0, 0.7, pictures=0), queries=[Query(str(i), noisy[i].picture, noisy) for i in range(8)]
    )
    free = write_report([made], tmp_path / "free.html", "T").stat().st_size
    monkeypatch.setattr(pages, "LIMIT", free // 2)
    assert write_report([made], tmp_path / "tight.html", "T").stat().st_size < free // 2


def test_a_folder_is_refused_as_the_file(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        write_report([RunView("r", "g", "MS", True, 0)], tmp_path, "T")


def test_nothing_but_the_page_is_left_behind(tmp_path):
    write_report([RunView("r", "g", "MS", True, 0)], tmp_path / "r.html", "T")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
def test_colours_have_the_contrast_that_reading_needs(full, scheme):
    root = re.findall(r":root \{(.*?)\}", full, flags=re.DOTALL)[scheme]
    colours = {
        name: c if len(c) == 7 else "#" + "".join(2 * d for d in c[1:]) for name, c in re.findall(r"--([\w-]+): (#\w+)", root)
    }
    text, strokes = {"ink", "soft", "with", "wrong", "anchor"}, {"without", "right", "drift-10", "drift-100", "drift-1000"}
    assert text | strokes | {"paper", "card"} <= colours.keys()
    for behind in ("paper", "card"):
        for name in text | strokes:
            low, high = sorted((_luminance(colours[behind]), _luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if name in text else 3), (name, behind)
