"""Draws docs/search.png, the README's picture of `xbm serve`: two runs, searched for the same photograph. Needs a Chromium.

`xbm index RUN PHOTOS` for both runs, then `PYTHONPATH=. python docs/search_picture.py RUN OTHER_RUN PHOTO`.
"""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.xbm_app.serve.serving import running
from xbm_app.search.searcher import Searcher
from xbm_app.serve.uploads import Decoders

PICTURE = Path(__file__).with_name("search.png")
SIZE = (1120, 740)


def screenshot(browser: Any, searchers: list[Searcher], image: int) -> Image.Image:
    """The page of a server, with the results for an image of the index."""
    address = running(searchers, Decoders(1))
    base = next(address)
    try:
        page = browser.new_page(viewport=dict(zip(("width", "height"), SIZE)))
        page.goto(f"{base}?like={image}")
        page.wait_for_selector("#results li")
        page.wait_for_load_state("networkidle")
        return Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    finally:
        next(address, None)


def save(shot: Image.Image, target: Path) -> None:
    shot.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def main(runs: list[Path], photo: str) -> None:
    searchers = [Searcher(run) for run in runs]
    found = searchers[0].catalogue.find((photo, ""))
    if found is None:
        sys.exit(f"{photo} is not in the index of {runs[0]}")
    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=shutil.which("chromium"))
        save(screenshot(browser, searchers, found), PICTURE)
        browser.close()


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:3]], sys.argv[3])
