import hashlib
import unicodedata

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from xbm.errors import InputError
from xbm_app.data import glyph_classes as classes
from xbm_app.data import glyphs
from xbm_app.data.glyph_classes import CANVAS
from xbm_app.data.glyph_render import TYPEFACES, charmap, draw, font_file, normalise, read_outlines
from xbm_app.data.glyph_sheet import closest_pairs, near_neighbours_sheet
from xbm_app.data.images import Dataset, Protocol
from xbm_app.data.sheet import contact_sheet

# The bytes of a build, whole and in part. They change with the recipe and with the fonts, and with nothing else.
SOME_VIEWS = "5fbd63dcc95bf7ae"
ALL_VIEWS = "8cf4489245614b81"


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(cache):
    return glyphs.read_glyphs(cache=cache)


def shape(points: list[tuple[float, float]]) -> np.ndarray:
    return np.array([[*p, *q] for p, q in zip(points, points[1:] + points[:1])], float)


def area(edges: np.ndarray) -> float:
    x0, y0, x1, y1 = edges.T
    return abs(float((x0 * y1 - x1 * y0).sum())) / 2


# ---------------------------------------------------------------------------------------------------------- drawing


def test_coverage_sums_to_the_area_under_any_affine_map():
    quadrilateral = shape([(0.1, 0.2), (0.9, 0.3), (0.6, 0.8), (0.2, 0.7)])
    matrix = np.array([[[9.3, -2.7, 3.1], [2.2, 7.9, 1.7]]])
    image = draw([quadrilateral], matrix, 13)[0]
    assert image.sum() == pytest.approx(area(quadrilateral) * (9.3 * 7.9 + 2.7 * 2.2), rel=1e-9)


def test_a_contour_drawn_the_other_way_round_is_a_hole():
    outer = shape([(0, 0), (6, 0), (6, 5), (0, 5)])
    hole = shape([(1.5, 1), (1.5, 4), (4, 4), (4, 1)])
    image = draw([np.concatenate([outer, hole])], np.array([[[1.0, 0, 0], [0, 1, 0]]]), 7)[0]
    assert image[2].tolist() == [1, 0.5, 0, 0, 1, 1, 0]
    assert image[5:].sum() == 0


def test_ink_beyond_the_border_is_cut_off_and_leaves_no_streak():
    image = draw([shape([(-3, 1), (2, 1), (2, 9), (-3, 9)])], np.array([[[1.0, 0, 0], [0, 1, 0]]]), 5)[0]
    assert image.tolist() == [[0] * 5] + [[1, 1, 0, 0, 0]] * 4


def test_glyphs_agree_with_another_rasteriser():
    for typeface, text in (("DejaVuSerif-BoldItalic", "g"), ("STIXGeneral", "&"), ("DejaVuSansMono", "Ж")):
        outline = read_outlines(typeface, [ord(text)])[0]
        font = ImageFont.truetype(font_file(typeface), 300, layout_engine=ImageFont.Layout.BASIC)
        theirs = Image.new("L", (400, 400))
        ImageDraw.Draw(theirs).text((30, 330), text, 255, font, anchor="ls")
        units = 2048 if typeface.startswith("DejaVu") else 1000
        matrix = np.array([[[300 / units, 0, 30], [0, -300 / units, 330]]])
        ours = draw([outline], matrix, 400)[0]
        assert np.abs(ours - np.asarray(theirs) / 255).sum() < 0.04 * ours.sum()


def test_scale_and_position_are_normalised_away():
    edges = shape([(3, 4), (7, 4), (7, 6)])
    again = normalise(edges * 2.5 + 11)
    assert np.allclose(normalise(edges), again)
    assert again.min() == -0.5 and again.max() == 0.5


# ---------------------------------------------------------------------------------------------------------- classes


def test_there_are_many_classes_and_each_has_six_to_sixteen_typefaces_that_really_draw_it():
    chosen = classes.glyph_classes()
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
    codes = {code for code, _ in classes.glyph_classes()}
    assert sum(ord(character) in codes for character in alike) <= 1


def test_characters_that_differ_in_shape_stay():
    codes = {code for code, _ in classes.glyph_classes()}
    assert {ord(c) for c in "ABEFGHKLMNPQRTUWYabdeqt234579&@#$ЖФЩΔΣΨ←→"} <= codes


def test_the_first_of_look_alikes_is_kept_and_an_accented_look_alike_goes_with_its_letter():
    found = classes.candidates({ord(character) for character in "CcСGĆć"})
    chosen = classes.choose_classes(found, quiet=True)
    assert [chr(code) for code, _ in chosen] == ["C", "G", "Ć"]


def test_a_character_loses_drawings_that_are_taken_and_is_left_out_when_they_are_more_than_a_quarter():
    def drawings(code: int, letters: str) -> classes.Drawings:
        outlines = [normalise(edges) for edges in read_outlines("DejaVuSans", [ord(letter) for letter in letters])]
        return classes.Drawings(code, tuple(range(len(letters))), outlines)

    found = [drawings(70, "ABEFKLMN"), drawings(71, "AGBHQRX8"), drawings(72, "TUYWE4FN2"), drawings(73, "aAdqy3")]
    chosen = classes.choose_classes(found, quiet=True)
    assert chosen == [(70, tuple(range(8))), (71, (1, 3, 4, 5, 6, 7))]


def test_classes_that_were_chosen_are_apart_at_every_turn_and_across_typefaces():
    chosen = classes.glyph_classes()[::29]
    drawings = [(code, t) for code, typefaces in chosen for t in typefaces[::2]]
    outlines = [normalise(read_outlines(TYPEFACES[t], [code])[0]) for code, t in drawings]
    code = np.array([code for code, _ in drawings])
    ink, far = classes.ink_and_far(classes.turned(outlines, classes.TURNS[0]))
    for turn in classes.TURNS:
        apart = classes.unmatched(*classes.ink_and_far(classes.turned(outlines, turn)), ink, far)
        assert not (classes.alike(apart, ink, ink) & (code[:, None] != code[None])).any()


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
    monkeypatch.setattr(classes, "TABLE", tmp_path / "table")
    assert classes.glyph_classes.__wrapped__() == tuple(chosen)


@pytest.mark.slow
def test_the_table_is_what_the_measurement_gives():
    assert tuple(classes.choose_classes(classes.candidates())) == classes.glyph_classes()


# ------------------------------------------------------------------------------------------------------------ views


def test_bytes_are_the_same_in_every_build_and_on_every_machine():
    some = classes.glyph_classes()[7::60]
    assert digest(glyphs.make_views(some, 32, 0)) == digest(glyphs.make_views(some, 32, 0)) == SOME_VIEWS


@pytest.mark.slow
def test_all_bytes_are_the_same_in_two_builds_and_on_every_machine():
    every = classes.glyph_classes()
    assert digest(glyphs.make_views(every, 32, 0)) == digest(glyphs.make_views(every, 32, 0)) == ALL_VIEWS


def test_a_view_depends_on_its_character_typeface_and_seed_alone():
    pair = classes.glyph_classes()[100:102]
    both, second = glyphs.make_views(pair, 27, 5), glyphs.make_views(pair[1:], 27, 5)
    assert both.shape[1:] == (27, 27) and both.dtype == np.uint8
    assert np.array_equal(both[len(pair[0][1]) :], second)
    assert (glyphs.make_views(pair[1:], 27, 6) != second).mean() > 0.9


def test_random_bits_are_uniform_and_differ_by_seed_key_and_position():
    bits = glyphs.random_bits(3, np.arange(50), 40)
    assert len(np.unique(np.concatenate([bits, glyphs.random_bits(4, np.arange(50), 40)]))) == 4000
    u = glyphs.uniform(bits, 0, 1)
    assert abs(u.mean() - 0.5) < 0.03 and abs(u.std() - 12**-0.5) < 0.02
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.08


def test_bending_keeps_contours_closed_and_moves_no_point_further_than_it_says():
    edges = normalise(read_outlines("DejaVuSerif", [ord("&")])[0])
    moves = glyphs.uniform(glyphs.random_bits(0, np.arange(1), 2 * (glyphs.BEND_CELLS + 1) ** 2))[0]
    bent = glyphs.bend(edges, moves)
    starts, ends = (np.sort(part.view("f8,f8").ravel()) for part in (bent[:, :2].copy(), bent[:, 2:].copy()))
    assert np.array_equal(starts, ends)
    assert 0.2 * glyphs.BEND < np.abs(bent - edges).max() <= glyphs.BEND


def test_grain_has_the_standard_deviation_that_it_names():
    bits = glyphs.random_bits(0, np.arange(9), 8 + (glyphs.BLOTCH_CELLS + 1) ** 2 + 31 * 31)
    bits[:, 8 : 8 + (glyphs.BLOTCH_CELLS + 1) ** 2] = 2**63  # even ground
    images = glyphs.degrade(np.full((9, 31, 31), 0.5), bits)
    assert images.std() / 255 == pytest.approx(glyphs.GRAIN, rel=0.05)
    assert images.mean() == pytest.approx(127.5, abs=1)


# -------------------------------------------------------------------------------------------------- the data set


def test_classes_are_split_in_halves_that_share_none(data):
    train, test = data.train, data.protocols[0].query
    assert not set(train.class_names) & set(test.class_names)
    assert train.num_classes + test.num_classes == len(classes.glyph_classes())
    assert 0 <= train.num_classes - test.num_classes <= 1
    assert np.bincount(train.labels).min() >= 6 and np.bincount(test.labels).max() <= 16
    assert data.protocols[0].gallery is None and data.protocols[0].ks == (1, 2, 4, 8)


def test_another_seed_splits_and_draws_anew(data):
    pixels = np.concatenate([data.train.pixels, data.protocols[0].query.pixels])
    other = glyphs.split(pixels, seed=1)
    assert 0.4 < len(set(other.train.class_names) & set(data.train.class_names)) / data.train.num_classes < 0.6


def test_labels_follow_the_images(data):
    name = data.train.class_names[17]
    code = int(name.split()[0][2:], 16)
    typefaces = dict(classes.glyph_classes())[code]
    alone = glyphs.make_views([(code, typefaces)], 32, 0)
    assert np.array_equal(data.train.pixels[data.train.labels == 17], alone)


def test_the_second_read_comes_from_the_cache(data, cache, monkeypatch):
    monkeypatch.setattr(glyphs, "make_views", None)
    again = glyphs.read_glyphs(cache=cache)
    assert np.array_equal(again.train.pixels, data.train.pixels)
    assert [file.suffix for file in cache.iterdir()] == [".npz"]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "other"])
def test_a_corrupt_cache_is_made_anew_quietly(harm, data, cache, tmp_path, monkeypatch, recwarn, capfd):
    file = tmp_path / next(cache.iterdir()).name
    content = bytearray(next(cache.iterdir()).read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 255
    file.write_bytes({"cut": content[: len(content) // 3], "flip": content, "empty": b"", "other": b"no"}[harm])
    everything = np.concatenate([data.train.pixels, data.protocols[0].query.pixels])
    monkeypatch.setattr(glyphs, "make_views", lambda *_: everything)
    assert glyphs._load(file) is None
    glyphs.read_glyphs(cache=tmp_path)
    assert np.array_equal(glyphs._load(file), everything)
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    glyphs._save(tmp_path / "file" / "glyphs.npz", np.zeros((2, 3, 3), np.uint8))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    glyphs._save(tmp_path / "glyphs.npz", np.zeros((2, 3, 3), np.uint8))
    assert not list(tmp_path.iterdir())


def test_the_cache_folder_is_the_users_to_choose(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("XBM_CACHE", raising=False)
    assert glyphs.cache_folder() == tmp_path / "xdg" / "xbm"
    monkeypatch.setenv("XBM_CACHE", str(tmp_path / "own"))
    assert glyphs.cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("size", [15, 257])
def test_a_size_out_of_range_is_an_error_that_names_the_range(size):
    with pytest.raises(InputError, match="16 to 256"):
        glyphs.read_glyphs(size=size)


# ------------------------------------------------------------------------------------------------------------ sheets


def test_a_contact_sheet_places_and_frames_its_images():
    images = [np.full((5, 7), 10 * k, np.uint8) for k in range(5)]
    sheet = np.asarray(contact_sheet(images, columns=2, frames=[None, (0, 255, 0), None, None, None]))
    assert sheet.shape == (3 * 9, 2 * 11, 3)
    assert sheet[9 + 4, 11 + 5].tolist() == [30, 30, 30]
    assert sheet[0, 11].tolist() == [0, 255, 0] and sheet[0, 0].tolist() == sheet[20, 15].tolist() == [128] * 3


def test_the_closest_classes_are_found_by_both_measures():
    images = np.zeros((6, CANVAS, CANVAS), np.uint8)
    images[0, 4:12, 4:9] = images[1, 2:20, 20:23] = 15  # class 70
    images[2, 18:24, 2:26] = images[3, 13:15, 3:19] = 15  # class 80
    images[4, 4:12, 5:13] = images[5, 22:26, 3:7] = 15  # class 90: its first drawing is nearly the first of class 70
    code = np.array([70, 70, 80, 80, 90, 90])
    by_ink, by_picture = closest_pairs(images, code, 2)
    assert by_ink[0] == by_picture[0] == (0, 4)
    assert len(by_ink) == len(by_picture) == 2


def test_the_sheet_of_near_neighbours_draws_train_and_test_classes_together(data):
    train, query = data.train, data.protocols[0].query
    small = train.select(np.flatnonzero(train.labels < 9))
    test = query.select(np.flatnonzero(query.labels % 60 == 7))
    sheet = near_neighbours_sheet(Dataset("glyphs", small, (Protocol("test", test, (1,)),)), pairs=10)
    assert sheet.size == (4 * 6 * 36 * 2, 3 * 2 * 36 * 2)
    view = np.asarray(sheet)[36 * 2 :: 2, ::2, 0][2:34, 2:34]
    assert (np.concatenate([small.pixels, test.pixels]) == view).all(axis=(1, 2)).sum() == 1
