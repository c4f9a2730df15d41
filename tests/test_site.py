"""The built site: strict, without broken links, and readable in a browser, on a screen and on a phone, light and dark."""

import os
import runpy
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAIN_PAGES = (
    "", "guides/start/", "guides/own-photographs/", "guides/wrong-labels/", "concepts/", "concepts/why-it-can-hurt/", "faq/",
    "reference/losses/", "reference/kernels/", "comparison/", "claims/", "robustness/", "gpu/", "architecture/", "security/",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_no_link_of_the_site_is_broken_and_nothing_comes_from_elsewhere(site):
    links = runpy.run_path(str(ROOT / "docs" / "site" / "links.py"))
    assert list(links["broken_in_site"](site)) == []
    assert len(list(site.rglob("index.html"))) >= 40 and not list(site.rglob("*.py"))


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_the_main_pages_fit_the_screen(browser, address, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for path in MAIN_PAGES:
        page.goto(address + path, wait_until="networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} is wider than the screen"
        shown = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert shown == {"light": "default", "dark": "slate"}[scheme]
        broken = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
        assert broken == []
    page.close()
    assert not [url for url in asked if not url.startswith((address, "data:"))] and wrong == []
