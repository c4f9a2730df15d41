"""The README's picture of the search page, made as a reader would make it: glyphs, two runs, one click. Needs a Chromium.

XBM_WRITE_DOCS=1 pytest -m slow tests/xbm_app/serve/test_readme_picture.py     # renews docs/search.png
"""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from tests.xbm_app.serve.serving import running
from xbm_app.cli.demo import ARMS, config_of
from xbm_app.data.glyphs import read_glyphs
from xbm_app.data.images import write_pictures
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.serve.uploads import Decoders
from xbm_app.train.loop import train

PICTURE = Path(__file__).parents[3] / "docs" / "search.png"
MOST_BYTES = 150_000


@pytest.mark.slow
@pytest.mark.browser
def test_the_picture_can_be_made_and_is_small(browser, tmp_path):
    glyphs = write_pictures(read_glyphs().protocols[0].query, tmp_path / "glyphs")
    searchers = []
    for arm in ARMS[2:4]:
        run = tmp_path / ("with_memory" if arm.memory else "without_memory")
        train(config_of(arm, seed=2), run, quiet=True)
        update(run, glyphs, run / "index", pytest.fail, quiet=True)
        searchers.insert(0, Searcher(run))
    assert [searcher.name for searcher in searchers] == ["with_memory", "without_memory"]
    shot = screenshot(browser, searchers, searchers[0].catalogue.find(("U+0026/0.png", "")))
    image = Image.open(io.BytesIO(shot)).convert("RGB").quantize(64)
    target = PICTURE if os.environ.get("XBM_WRITE_DOCS") else tmp_path / "search.png"
    image.save(target, optimize=True)
    assert target.stat().st_size < MOST_BYTES and image.size == (1120, 740)


def screenshot(browser, searchers, image):
    address = running(searchers, Decoders(1))
    base = next(address)
    try:
        page = browser.new_page(viewport={"width": 1120, "height": 740})
        page.goto(f"{base}?like={image}")
        page.wait_for_selector("#results li")
        page.wait_for_load_state("networkidle")
        return page.screenshot()
    finally:
        next(address, None)
