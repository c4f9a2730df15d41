"""The page as its users meet it: with a mouse, by keyboard, through a screen reader's eyes, on a phone. Needs a Chromium."""

import base64
import time

import pytest

from tests.xbm_app.serve.bombs import png_of_zeros, text_named_jpg

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")]

STICKING_OUT = """[...document.querySelectorAll('main *')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
ALL_PICTURES = "[...document.images].filter(i => i.offsetParent).every(i => i.complete && i.naturalWidth > 0)"
DROP = """const dataTransfer = new DataTransfer(); dataTransfer.items.add(FILE);
    for (const name of ['dragover', 'drop']) document.querySelector('#gallery').dispatchEvent(
        new DragEvent(name, {dataTransfer, bubbles: true, cancelable: true}));"""
PASTE = """const data = new DataTransfer(); data.items.add(FILE);
    document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}));"""
SEND_50_MB = """async () => {
    const body = new FormData(); body.append('image', new Blob([new Uint8Array(5e7)]), 'a.jpg');
    const answer = await fetch('/api/search', {method: 'POST', body});
    return [answer.status, (await answer.json()).error]; }"""
FOCUSED = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || 'skip'"


@pytest.fixture
def visit(browser, single, comparing):
    """Opens the page and returns it with what went wrong on it: errors, and requests to anywhere else."""
    contexts = []

    def opened(both=False, width=1280, scheme="light", path=""):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        base = comparing if both else single
        page, wrong = context.new_page(), []
        page.set_default_timeout(10_000)
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        here = (base, base.replace("http", "blob:http"), "data:", "blob:")
        page.on("request", lambda request: None if request.url.startswith(here) else wrong.append(request.url))
        page.goto(base + path)
        page.wait_for_selector("#images li, #results li")
        return page, wrong

    yield opened
    for context in contexts:
        context.close()


def until(page, script, arg=None):
    """Waits for a condition. The page's policy forbids `eval`, which Playwright's own way to wait would need."""
    for _ in range(400):
        if page.evaluate(script, arg):
            return
        time.sleep(0.025)
    pytest.fail(f"it did not come to that: {script}")


def results(page):
    """Labels and similarities of the first run's results, once they are there."""
    page.wait_for_selector("#results:not([aria-busy]) li")
    return [
        (item.locator("small").inner_text(), float(item.locator("b").inner_text()))
        for item in page.locator("#results ol").first.locator("li").all()
    ]


def with_file(script, content):
    """A script with the bytes of a file in the place of FILE."""
    file = f"new File([Uint8Array.from(atob('{base64.b64encode(content).decode()}'), c => c.charCodeAt(0))], 'given.png')"
    return f"() => {{ {script.replace('FILE', file)} }}"


@pytest.fixture(scope="module")
def photo(own_photos):
    return own_photos / "class_03" / "2.png"


def test_an_upload_shows_itself_and_its_nearest_in_order(visit, photo):
    page, wrong = visit()
    page.set_input_files("#file", photo)
    found = results(page)
    assert found[0] == ("class_03", 1.0) and len(found) == 24
    assert [similarity for _, similarity in found] == sorted((similarity for _, similarity in found), reverse=True)
    assert page.locator("#asked").inner_text() == "2.png" and page.locator("#picture").evaluate("i => i.naturalWidth") == 16
    assert "24 images, nearest first; the nearest is class_03, similarity 1.000" in page.locator("#status").inner_text()
    assert not page.locator("#gallery").is_visible() and wrong == []


def test_an_image_can_be_pasted(visit, photo):
    page, wrong = visit()
    page.evaluate(with_file(PASTE, photo.read_bytes()))
    assert results(page)[0] == ("class_03", 1.0) and wrong == []


def test_an_image_can_be_dropped_anywhere(visit, photo):
    page, wrong = visit()
    page.evaluate(with_file(DROP, photo.read_bytes()))
    assert results(page)[0] == ("class_03", 1.0) and wrong == []
    assert not page.evaluate("document.body.classList.contains('dropping')")


def test_pasted_text_is_left_alone(visit):
    page, wrong = visit()
    page.evaluate(f"() => {{ {PASTE.replace('data.items.add(FILE);', '')} }}")
    assert page.locator("#gallery").is_visible() and page.locator("#error").inner_text() == "" and wrong == []


def test_clicking_through_and_back(visit):
    page, wrong = visit()
    first = page.locator("#images li small").nth(3).inner_text()
    page.locator("#images li button").nth(3).click()
    found = results(page)
    assert page.locator("#asked").inner_text() == first and found[0][1] < 1 and "like=" in page.url
    assert page.evaluate("document.activeElement.id") == "results"  # where a keyboard goes on
    one = page.url
    page.locator("#results li button").nth(1).click()
    until(page, "url => location.href !== url", arg=one)
    until(page, "label => document.querySelector('#asked').textContent === label", arg=found[1][0])
    page.go_back()
    until(page, "label => document.querySelector('#asked').textContent === label", arg=first)
    assert results(page) == found
    page.reload()
    assert results(page) == found  # the address is enough
    page.click("#home")
    page.wait_for_selector("#gallery li")
    assert page.url.endswith("/") and not page.locator("#results").is_visible() and wrong == []


@pytest.mark.slow
def test_going_back_to_an_upload(visit, photo):
    page, wrong = visit()
    page.set_input_files("#file", photo)
    found = results(page)
    page.locator("#results li button").nth(5).click()
    until(page, "document.querySelector('#asked').textContent !== '2.png'")
    page.go_back()
    until(page, "document.querySelector('#asked').textContent === '2.png'")
    assert results(page) == found and wrong == []


def test_a_label_narrows_results_and_gallery(visit, photo):
    page, wrong = visit()
    page.fill("#label", "class_0")
    until(page, "document.querySelectorAll('#labels option').length === 10")
    page.fill("#label", "class_07")
    page.press("#label", "Enter")
    until(page, "document.querySelectorAll('#images li').length === 6")
    page.set_input_files("#file", photo)
    assert [label for label, _ in results(page)] == ["class_07"] * 6
    page.click("#any")
    until(page, "document.querySelectorAll('#results li').length === 24")
    page.fill("#label", "nobody")
    page.press("#label", "Enter")
    until(page, "document.querySelector('#status').textContent === 'Nothing found.'")
    assert "No image that meets the conditions found." in page.locator("#results").inner_text() and wrong == []


def test_two_runs_side_by_side_on_the_same_query(visit, photo, searchable, finished):
    page, wrong = visit(both=True)
    page.set_input_files("#file", photo)
    page.wait_for_selector("#results li")
    assert page.locator("#results h2").all_inner_texts() == [f"{run.parent.name}/run" for run in (searchable, finished)]
    one, other = page.locator("#results ol").all()
    assert one.locator("li").count() == other.locator("li").count() == 24
    boxes = one.bounding_box(), other.bounding_box()
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    other.locator("li button").nth(2).click()
    until(page, "document.querySelector('#asked').textContent !== '2.png'")
    assert "run=1" in page.url and "with the same label" in page.locator("#results small").first.inner_text()
    label = page.locator("#asked").inner_text()
    marked = page.locator("#results ol").first.locator("li.same small").all_inner_texts()
    assert marked and set(marked) == {label} and wrong == []


@pytest.mark.parametrize("kind", ["text", "bomb", "large", pytest.param("cut", marks=pytest.mark.slow)])
def test_what_is_no_usable_image_is_told_in_a_sentence(visit, photo, tmp_path, kind):
    words = {
        "text": "not an image",
        "bomb": "at most 50 million",
        "cut": "damaged",
        "large": "has 50.0 MB: give one of at most 20 MB",
    }
    page, wrong = visit()
    page.set_input_files("#file", photo)
    results(page)
    path = tmp_path / "given.png"
    if kind == "text":
        path = text_named_jpg(tmp_path)
    elif kind == "large":
        path.write_bytes(photo.read_bytes() + bytes(50_000_000 - photo.stat().st_size))
    else:
        path.write_bytes(png_of_zeros(10_000, 10_000) if kind == "bomb" else photo.read_bytes()[:-300])
    page.set_input_files("#file", path)
    until(page, "document.querySelector('#error').textContent !== ''")
    assert words[kind] in page.locator("#error").inner_text() and page.locator("#error").get_attribute("role") == "alert"
    assert page.locator("#results li").count() == 0  # results of before are not taken for those of this file
    page.wait_for_selector("#images li")
    assert [text for text in wrong if "Failed to load resource" not in text] == []
    page.fill("#label", "class_07")
    page.press("#label", "Enter")
    until(page, "document.querySelectorAll('#images li').length === 6")
    assert page.locator("#error").inner_text() == ""  # what failed is not asked again
    page.click("#any")
    page.set_input_files("#file", photo)
    assert results(page)[0] == ("class_03", 1.0) and page.locator("#error").inner_text() == ""


@pytest.mark.slow
def test_a_page_that_sends_50_mb_all_the_same_is_answered(visit):
    page, _ = visit()
    status, told = page.evaluate(SEND_50_MB)
    assert status == 413 and "larger than 20 MB" in told


def test_a_server_that_is_gone_is_told(visit, photo):
    page, _ = visit()
    page.route("**/api/search*", lambda route: route.abort())
    page.set_input_files("#file", photo)
    until(page, "document.querySelector('#error').textContent.includes('does not answer')")


def test_the_keyboard_reaches_everything_in_order(visit):
    page, wrong = visit()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert reached[:5] == ["skip", "home", "file", "label", "others"] and reached[5].startswith("more like this: class_")
    outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outlined != "none"
    page.keyboard.press("Enter")
    results(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("rank 1, class_")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'results'")
    assert wrong == []


def test_a_screen_reader_is_told_names_roles_and_news(visit, photo):
    page, _ = visit()
    for role, name in [("button", "Show others"), ("combobox", "Only with the label"), ("link", "xbm search")]:
        assert page.get_by_role(role, name=name, exact=True).count() == 1, name
    assert page.get_by_label("Choose an image").count() == 1
    page.set_input_files("#file", photo)
    results(page)
    assert page.locator("#status").get_attribute("role") == "status"
    assert page.get_by_role("button", name="rank 1, class_03, similarity 1.000; more like this").count() == 1
    assert page.get_by_role("img", name="the image that you gave").count() == 1
    bare = "[...document.querySelectorAll('img')].filter(i => !i.hasAttribute('alt')).length"
    assert page.evaluate(bare) == 0 and page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize(
    ("both", "width", "scheme"),
    [(True, 1280, "light"), (False, 1280, "dark"), (False, 390, "light"), (True, 390, "dark")]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [(False, 1280, "light"), (True, 1280, "dark"), (True, 390, "light"), (False, 390, "dark")]
    ],
)
def test_nothing_overflows_breaks_or_complains(visit, photo, tmp_path_factory, both, width, scheme):
    page, wrong = visit(both, width, scheme)
    for state in ("home", "upload"):
        if state == "upload":
            page.set_input_files("#file", photo)
            results(page)
        until(page, ALL_PICTURES)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        assert page.evaluate(STICKING_OUT) == [] and wrong == []
        shot = tmp_path_factory.getbasetemp() / "screenshots" / f"{'two' if both else 'one'}-{state}-{width}-{scheme}.png"
        shot.parent.mkdir(exist_ok=True)
        page.screenshot(path=shot)
    bright = sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"))
    assert bright > 600 if scheme == "light" else bright < 150
