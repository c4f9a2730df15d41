import unicodedata

import numpy as np
import pytest

from xbm_app.data import glyph_classes as classes
from xbm_app.data import glyphs
from xbm_app.data.glyph_classes import CANVAS, charmap, closest_pairs, near_neighbours_sheet
from xbm_app.data.glyphs import TYPEFACES, glyph_classes, normalise, read_glyphs, read_outlines
from xbm_app.data.images import Dataset, Protocol


def test_there_are_many_classes_and_each_has_six_to_sixteen_typefaces_that_really_draw_it():
    chosen = glyph_classes()
    assert len(chosen) >= 900
    assert len({code for code, _ in chosen}) == len(chosen)
    for code, typefaces in chosen:
        assert 6 <= len(set(typefaces)) <= 16
        assert all(code in charmap(TYPEFACES[k]) for k in typefaces)


@pytest.mark.parametrize(
    "alike",
    [
        "AΑА",
        "Cc",
        "CСϹ",
        "oO0оΟ",
        "lI|",
        "-–—",
        ".·•",
        "xX×",
        "ĆćĊ",
        "\u00b5\u03bc",
        "\u03a9\u2126",
        "2²",
        "/∕⁄",
        "sS",
        "ŞȘ",
        "ĕě",
    ],
)
def test_of_look_alikes_at_most_one_is_a_class(alike):
    codes = {code for code, _ in glyph_classes()}
    assert sum(ord(character) in codes for character in alike) <= 1


def test_characters_that_differ_in_shape_stay():
    codes = {code for code, _ in glyph_classes()}
    assert {ord(c) for c in "ABEFGHKLMNPQRTUWYabdeqt234579&@#$ЖФЩΔΣΨ←→"} <= codes


def test_the_first_of_look_alikes_is_kept_and_an_accented_look_alike_goes_with_its_letter():
    characters = classes.candidates({ord(character) for character in "CcСGĆć"})
    chosen = classes.choose_classes(characters, quiet=True)
    assert [chr(code) for code, _ in chosen] == ["C", "G", "Ć"]


def test_a_character_loses_drawings_that_are_taken_and_is_left_out_when_they_are_more_than_a_quarter():
    def drawings(code: int, letters: str) -> classes.Drawings:
        outlines = [normalise(edges) for edges in read_outlines("DejaVuSans", [ord(letter) for letter in letters])]
        return classes.Drawings(code, tuple(range(len(letters))), outlines)

    characters = [drawings(70, "ABEFKLMN"), drawings(71, "AGBHQRX8"), drawings(72, "TUYWE4FN2"), drawings(73, "aAdqy3")]
    chosen = classes.choose_classes(characters, quiet=True)
    assert chosen == [(70, tuple(range(8))), (71, (1, 3, 4, 5, 6, 7))]


def test_classes_that_were_chosen_are_apart_at_every_turn_and_across_typefaces():
    chosen = glyph_classes()[::29]
    drawings = [(code, t) for code, typefaces in chosen for t in typefaces[::2]]
    outlines = [normalise(read_outlines(TYPEFACES[t], [code])[0]) for code, t in drawings]
    code = np.array([code for code, _ in drawings])
    ink, far = classes.ink_and_far(classes.turned(outlines, classes.TURNS[0]))
    for turn in classes.TURNS:
        distance = classes.unmatched(*classes.ink_and_far(classes.turned(outlines, turn)), ink, far)
        assert not (classes.alike(distance, ink, ink) & (code[:, None] != code[None])).any()


def test_unmatched_ink_is_counted_beyond_the_tolerance_and_on_the_worse_side():
    images = np.zeros((2, classes.CANVAS, classes.CANVAS), np.uint8)
    images[0, 5:8, 5:8] = images[1, 6:9, 6:9] = classes.LEVELS  # one pixel off: matched
    images[1, 20:23, 10:12] = classes.LEVELS  # six pixels of its own
    ink, far = classes.ink_and_far(images)
    assert classes.unmatched(ink, far, ink, far).tolist() == [[0, 6], [6, 0]]


def test_spaces_marks_variants_and_patterns_are_no_candidates():
    for character in " \u0301\u200b\ue000²½①ℂ⠿█│ấ":
        assert not classes.is_candidate(ord(character)), unicodedata.name(character, character)
    for character in "Aé5+ﬁЖ":
        assert classes.is_candidate(ord(character))


def test_the_table_reads_back_what_was_written(tmp_path, monkeypatch):
    chosen = [(0x41, (0, 3, 15)), (0x1E9E, (1, 2))]
    (tmp_path / "table").write_text(classes.table(chosen), encoding="utf-8")
    monkeypatch.setattr(glyphs, "TABLE", tmp_path / "table")
    assert glyph_classes.__wrapped__() == tuple(chosen)


@pytest.mark.slow
def test_the_table_is_what_the_measurement_gives():
    assert tuple(classes.choose_classes(classes.candidates())) == glyph_classes()


def test_the_closest_classes_are_found_by_both_measures():
    images = np.zeros((6, CANVAS, CANVAS), np.uint8)
    images[0, 4:12, 4:9] = images[1, 2:20, 20:23] = 15  # class 70
    images[2, 18:24, 2:26] = images[3, 13:15, 3:19] = 15  # class 80
    images[4, 4:12, 5:13] = images[5, 22:26, 3:7] = 15  # class 90: its first drawing is nearly the first of class 70
    code = np.array([70, 70, 80, 80, 90, 90])
    by_ink, by_picture = closest_pairs(images, code, 2)
    assert by_ink[0] == by_picture[0] == (0, 4)
    assert len(by_ink) == len(by_picture) == 2


def test_the_sheet_of_near_neighbours_draws_train_and_test_classes_together(tmp_path):
    data = read_glyphs(cache=tmp_path)
    train, query = data.train, data.protocols[0].query
    small = train.select(np.flatnonzero(train.labels < 9))
    test = query.select(np.flatnonzero(query.labels % 60 == 7))
    sheet = near_neighbours_sheet(Dataset("glyphs", small, (Protocol("test", test, (1,)),)), pairs=10)
    assert sheet.size == (4 * 6 * 36 * 2, 3 * 2 * 36 * 2)
    pixels = np.asarray(sheet)[::2, ::2, 0]
    assert (pixels[[0, 1, 34, 35]] == 128).all() and (pixels[:, [0, 1, 34, 35]] == 128).all()  # frames
    view = pixels[36:][2:34, 2:34]
    assert (np.concatenate([small.pixels, test.pixels]) == view).all(axis=(1, 2)).sum() == 1
