"""Text queries and conditions on the page, from an index in a folder and from one in Milvus. Needs a Chromium."""

import pytest

from tests.xbm_app.serve.serving import running
from tests.xbm_app.serve.test_page_in_a_browser import results
from xbm_app.search.searcher import OwnEncoder, Searcher
from xbm_app.search.update import update

pytestmark = pytest.mark.browser


@pytest.fixture(params=["folder", "milvus"])
def address(request, decoders, own_encoder, colors, tmp_path):
    where = tmp_path / "index" if request.param == "folder" else f"milvus:{tmp_path / 'index.db'}"
    encoder = OwnEncoder(f"{own_encoder}:Encoder")
    update(encoder, colors, where, pytest.fail, quiet=True)
    yield from running([Searcher(where, encoder=encoder, hold=True)], decoders)


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(10_000)
    yield page
    context.close()


def titles_on(page):
    """All at once: the page may replace its results between two questions."""
    return page.eval_on_selector_all("#results button", "buttons => buttons.map(button => button.title)")


def test_a_text_and_a_condition_find_their_images(page, address, tmp_path):
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    page.fill("#text", "red")
    page.press("#text", "Enter")
    assert [name for name, _ in results(page)][:2] == ["x", "x"] and page.inner_text("#asked") == "“red”"
    titles = titles_on(page)
    assert titles[0] == "photos/0.png\nprice: 0" and not page.is_visible("#picture")
    page.fill("#where", "price>=10 and price<=20")
    page.press("#where", "Enter")
    for _ in range(100):
        titles = titles_on(page)
        if len(titles) == 2:
            break
        page.wait_for_timeout(50)
    assert titles == ["photos/1.png\nprice: 10", "photos/2.png\nprice: 20"]
    assert "text=red" in page.url and "where=price" in page.url
    page.reload()
    assert len(results(page)) == 2 and page.input_value("#text") == "red"
    page.fill("#where", "prise<3")
    page.press("#where", "Enter")
    page.wait_for_selector("#error:not(:empty)")
    assert "did you mean 'price'" in page.inner_text("#error") and wrong == []
    page.screenshot(path=str(tmp_path / "page.png"))
