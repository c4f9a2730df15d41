"""The README's picture of the search page can be made: here of glyphs and two runs. Needs a Chromium."""

import runpy
from pathlib import Path

import pytest

from xbm_app.cli.demo import ARMS, config_of
from xbm_app.data.glyphs import read_glyphs
from xbm_app.data.images import write_pictures
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.train.loop import train

SCRIPT = Path(__file__).parents[3] / "docs" / "search_picture.py"
MOST_BYTES = 400_000


@pytest.mark.slow
@pytest.mark.browser
def test_the_picture_can_be_made_and_is_small(browser, tmp_path):
    picture = runpy.run_path(str(SCRIPT))
    glyphs = write_pictures(read_glyphs().protocols[0].query, tmp_path / "glyphs")
    searchers = []
    for arm in ARMS[2:4]:
        run = tmp_path / ("with_memory" if arm.memory else "without_memory")
        train(config_of(arm, seed=2), run, quiet=True)
        update(run, glyphs, run / "index", pytest.fail, quiet=True)
        searchers.insert(0, Searcher(run))
    assert [searcher.name for searcher in searchers] == ["with_memory", "without_memory"]
    shot = picture["screenshot"](browser, searchers, searchers[0].catalogue.find(("U+0026/0.png", "")))
    picture["save"](shot, tmp_path / "search.png")
    assert (tmp_path / "search.png").stat().st_size < MOST_BYTES and shot.size == (1120, 740)


def test_the_picture_of_the_readme_is_small():
    assert SCRIPT.with_name("search.png").stat().st_size < MOST_BYTES
