import hashlib

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from xbm.errors import InputError
from xbm_app.data import glyphs
from xbm_app.data.glyphs import draw, font_file, glyph_classes, normalise, read_outlines

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


# -------------------------------------------------------------------------------------------------------------- drawing


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


# ---------------------------------------------------------------------------------------------------------------- views


def test_bytes_are_the_same_in_every_build_and_on_every_machine():
    some = glyph_classes()[7::60]
    assert digest(glyphs.make_views(some, 32, 0)) == digest(glyphs.make_views(some, 32, 0)) == SOME_VIEWS


@pytest.mark.slow
def test_all_bytes_are_the_same_in_two_builds_and_on_every_machine():
    every = glyph_classes()
    assert digest(glyphs.make_views(every, 32, 0)) == digest(glyphs.make_views(every, 32, 0)) == ALL_VIEWS


def test_a_view_depends_on_its_character_typeface_and_seed_alone():
    pair = glyph_classes()[100:102]
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


# --------------------------------------------------------------------------------------------------------- the data set


def test_classes_are_split_in_halves_that_share_none(data):
    train, test = data.train, data.protocols[0].query
    assert not set(train.class_names) & set(test.class_names)
    assert train.num_classes + test.num_classes == len(glyph_classes())
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
    typefaces = dict(glyph_classes())[code]
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
