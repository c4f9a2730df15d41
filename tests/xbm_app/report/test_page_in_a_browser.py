"""The page as a reader meets it: on a desk and on a phone, by day and by night. Needs a Chromium."""

from dataclasses import replace

import pytest

from tests.xbm_app.report.synthetic_runs import demo, run
from xbm_app.report.page import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    word = "anUnreasonablyLongNameWithoutAnySpace" * 4  # no place to break a line
    told = {"loss": word, "config": {word: word}, "command": word, "data": word, "notes": [("error", word)]}
    told["doubtful"] = [replace(each, label=word, nearest=word, own=[]) for each in run("a", True, 0, 0.6).doubtful]
    long = [replace(run("a", memory, 0, 0.6, pictures=2), group=f"{word} {memory}", **told) for memory in (False, True)]
    return {
        "comparison": write_report(demo(), folder / "comparison.html", "Glyphs with and without a cross-batch memory"),
        "single": write_report([run("contrastive", True, 0, 0.699)], folder / "single.html", "One run"),
        "long": write_report(long, folder / "long.html", word),
    }


@pytest.fixture
def visit(browser, reports, tmp_path):
    """Opens a report and returns its page and what went wrong while it loaded."""
    contexts = []

    def opened(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, wrong = context.new_page(), []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url))
        page.goto(reports[name].as_uri())
        return page, wrong

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("comparison", width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
    + [("single", 1280, "dark"), ("single", 390, "light"), ("long", 1280, "light"), ("long", 390, "dark")],
)
def test_nothing_overflows_breaks_or_complains(visit, tmp_path_factory, name, width, scheme):
    page, wrong = visit(name, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    sticking_out = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .panels, .strip, nav, pre, svg')
        && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(sticking_out) == []
    assert wrong == []
    assert page.evaluate("document.images.length") > 0
    assert page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth > 0)).length") == 0
    if name == "long":
        return
    shot = tmp_path_factory.getbasetemp() / "screenshots" / f"{name}-{width}-{scheme}.png"
    shot.parent.mkdir(exist_ok=True)
    page.screenshot(path=shot, full_page=True)


def test_dark_is_dark_and_light_is_light(visit):
    def brightness(scheme):
        page, _ = visit("single", scheme=scheme)
        return sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"))

    assert brightness("light") > 600 and brightness("dark") < 150


def test_words_in_charts_can_be_read_on_a_phone(visit):
    page, _ = visit("comparison", width=390)
    heights = page.evaluate("[...document.querySelectorAll('.panel svg text')].map(t => t.getBoundingClientRect().height)")
    assert len(heights) > 20 and min(heights) >= 10


def test_on_a_phone_the_charts_of_a_figure_stand_side_by_side(visit):
    """One below the other, those of this page were 6,000 pixels of its 19,000."""
    page, _ = visit("comparison", width=390)
    height = "[...document.querySelectorAll('figure .panels')].map(e => e.offsetHeight)"
    assert sum(page.evaluate(height)) < 2_200 and page.evaluate("document.documentElement.scrollHeight") < 12_500
    figures = page.evaluate(
        "[...document.querySelectorAll('figure')].filter(e => e.querySelectorAll('.panel').length > 1).length"
    )
    reached = """[...document.querySelectorAll('figure .panels')].filter(e => {
        e.scrollLeft = 1e6; return e.lastElementChild.getBoundingClientRect().right <= innerWidth + 1 }).length"""
    assert figures > 0 and page.evaluate(reached) == page.evaluate("document.querySelectorAll('figure').length")
    page, _ = visit("single", width=390)
    assert page.evaluate("document.documentElement.scrollHeight") < 8_000


def test_of_the_best_row_only_the_scores_are_bold(visit):
    page, _ = visit("comparison")
    weights = "[...document.querySelectorAll('#results .best')].map(r => [r.cells[2], r.cells[r.cells.length - 1].firstChild])"
    for score, time in page.evaluate(f"{weights}.map(p => p.map(e => +getComputedStyle(e).fontWeight))"):
        assert score > 600 and time == 400


def test_the_legend_follows_the_pointer_and_comes_back_to_rest(visit):
    page, wrong = visit("comparison")
    panel = page.locator("#recall .panel").first
    resting = panel.locator(".legend b").all_inner_texts()
    chart = panel.locator("svg[data-lines]")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 456 / 480, box["y"] + box["height"] / 2)
    assert panel.locator(".at").inner_text() == "K = 32"
    assert all(float(now) > float(before) for now, before in zip(panel.locator(".legend b").all_inner_texts(), resting))
    page.mouse.move(2, 2)
    assert panel.locator(".at").inner_text() == "K = 1"
    assert panel.locator(".legend b").all_inner_texts() == resting and wrong == []


def test_the_page_prints_in_ink_on_white(visit):
    page, wrong = visit("single", scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none" and wrong == []
