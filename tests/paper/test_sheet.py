import numpy as np

from paper.blocks import Tile
from paper.sheet import BREAK, FRAME, FRAMES, GAP, SIDE, WORDS, draw_sheet
from xbm_app.data.images import Dataset, ImageSet, Protocol


def one(name: str, grey: int) -> ImageSet:
    return ImageSet(name, np.array([0]), ["a"], pixels=np.full((1, 8, 8), grey, np.uint8))


def test_every_picture_is_at_its_place_in_its_frame():
    sets = [one(name, grey) for name, grey in (("x train", 40), ("x query", 120), ("x gallery", 200))]
    dataset = Dataset("x", sets[0], (Protocol("test", sets[1], (1,), sets[2]),))
    rows = [[Tile("train", 0, "anchor", "anchor")], [], [Tile("query", 0, "wrong", ""), Tile("gallery", 0, "right", "0.50")]]
    sheet = draw_sheet(rows, dataset)
    wide, high = SIDE + 2 * FRAME + GAP, SIDE + 2 * FRAME + WORDS + GAP
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
