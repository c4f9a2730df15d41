import math

import pytest
import torch
from torchvision.transforms.v2 import functional as theirs

from xbm_app.data.distortions import (
    BITS,
    BLEND,
    COLOR,
    DRAWS,
    ERASED,
    JITTER,
    MOVE,
    NAMES,
    SHEAR,
    STRENGTH,
    TURN,
    distort,
    erase,
    jitter,
    move,
    recolor,
    uniform,
)

OFFSET, GAIN = torch.tensor([127.0, 100.0, 80.0]), torch.tensor([0.02, 0.013, 0.016])


def pictures(count=5, channels=3, side=13, seed=0):
    images = torch.rand((count, channels, side, side), generator=torch.Generator().manual_seed(seed))
    return (images * 255).round() / 255


def one(name, count=5):
    return torch.full((count,), NAMES.index(name))


THEIRS = {
    "brightness": theirs.adjust_brightness,
    "saturation": theirs.adjust_saturation,
    "contrast": theirs.adjust_contrast,
    "sharpness": theirs.adjust_sharpness,
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("factor", [1 - BLEND * STRENGTH, 1 + BLEND * STRENGTH])
def test_blends_are_those_of_torchvision(name, factor):
    images = pictures()
    found = recolor(images, one(name), torch.full((5,), factor))
    torch.testing.assert_close(found, THEIRS[name](images, factor), atol=1e-6, rtol=0)
    assert not torch.allclose(found, images, atol=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("posterize", lambda images: theirs.posterize((images * 255).round().byte(), BITS) / 255),
        ("solarize", lambda images: theirs.solarize(images, 1 - STRENGTH)),
        ("autocontrast", theirs.autocontrast),
        ("identity", lambda images: images),
        ("rotate", lambda images: images),
    ],
)
def test_the_other_operations_on_colors_are_those_of_torchvision(name, expected):
    images = pictures() * 0.8
    images = (images * 255).round() / 255
    found = recolor(images, one(name), torch.ones(5))
    torch.testing.assert_close(found, expected(images), atol=1e-5, rtol=0)


def test_an_image_of_one_color_has_no_contrast_to_stretch():
    images = torch.full((2, 3, 7, 7), 0.25)
    assert torch.equal(recolor(images, one("autocontrast", 2), torch.ones(2)), images)


GEOMETRY = {
    "rotate": {"angle": -math.degrees(TURN * STRENGTH)},
    "shear x": {"shear": [math.degrees(math.atan(SHEAR * STRENGTH)), 0.0]},
    "shear y": {"shear": [0.0, math.degrees(math.atan(SHEAR * STRENGTH))]},
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_rotations_and_shears_are_those_of_torchvision(name):
    images = pictures(side=21)
    usual = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    expected = [
        theirs.affine(images, **{**usual, **GEOMETRY[name]}, interpolation=theirs.InterpolationMode.BILINEAR),
        theirs.affine(
            images,
            **{**usual, **{k: -v if k == "angle" else [-x for x in v] for k, v in GEOMETRY[name].items()}},
            interpolation=theirs.InterpolationMode.BILINEAR,
        ),
    ]
    identity = one("identity")
    found = [move(images, torch.stack([one(name), identity], 1), torch.full((5, 2), sign)) for sign in (1.0, -1.0)]
    for each in found:
        assert min(float((each - image).abs().amax()) for image in expected) < 1e-4
    assert not torch.allclose(*found, atol=0.01)


def test_moves_are_a_share_of_the_side():
    side = 40
    images = torch.zeros(1, 1, side, side)
    images[:, :, 10:30, 10:30] = 1
    moved = move(images, torch.stack([one("move x", 1), one("identity", 1)], 1), torch.ones(1, 2))
    shift = MOVE * STRENGTH * side
    columns = moved[0, 0].sum(0)
    center = (columns * torch.arange(side)).sum() / columns.sum()
    assert float(center) == pytest.approx(19.5 - shift, abs=0.05)


def test_two_operations_of_an_image_are_both_applied():
    images = pictures(side=21)
    both = move(images, torch.stack([one("rotate"), one("rotate")], 1), torch.tensor([[1.0, -1.0]]).expand(5, 2))
    torch.testing.assert_close(both, images, atol=1e-4, rtol=0)


def test_each_image_has_an_operation_of_its_own():
    images = pictures(len(COLOR))
    operations = torch.tensor([NAMES.index(name) for name in COLOR])
    together = recolor(images, operations, torch.full((len(COLOR),), 0.7))
    for k, name in enumerate(COLOR):
        assert torch.equal(together[k], recolor(images[k : k + 1], one(name, 1), torch.tensor([0.7]))[0])


def test_jitter_multiplies_the_three_factors():
    images = pictures(2)
    found = jitter(images, torch.tensor([[1.1, 0.9, 1.2], [1.0, 1.0, 1.0]]))
    expected = theirs.adjust_saturation(theirs.adjust_contrast(theirs.adjust_brightness(images, 1.1), 0.9), 1.2)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], images[1], atol=1e-6, rtol=0)


def test_a_rectangle_of_the_stated_area_and_place_is_erased():
    images = torch.ones(3, 2, 30, 30)
    draws = torch.tensor([[0.0, 1.0, 0.5, 0.0, 0.0], [ERASED, 1.0, 0.5, 0.0, 0.0], [0.0, 0.5, 1.0, 0.999, 0.999]])
    erased = erase(images, draws) == 0
    assert erased[0, 0].sum() == round(math.sqrt(900 / 3)) ** 2 and erased[0, 0, 0, 0]  # a square
    assert not erased[1].any()
    rows, columns = erased[2, 0].any(1).sum(), erased[2, 0].any(0).sum()
    assert rows == 23 and columns == 7 and erased[2, 0, -1, -1]  # √(area · 3.3) and √(area / 3.3)
    assert torch.equal(erased[:, 0], erased[:, 1])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_distortion_depends_on_seed_step_and_id_alone(channels):
    images, ids = pictures(9, channels), torch.arange(9) * 7
    norm = OFFSET[:channels], GAIN[:channels]
    whole = distort(images, 3, 17, ids, *norm)
    some = torch.tensor([8, 0, 5])
    torch.testing.assert_close(distort(images[some], 3, torch.tensor(17), ids[some], *norm), whole[some], atol=1e-6, rtol=0)
    for seed, step in ((4, 17), (3, 18)):
        assert not torch.allclose(distort(images, seed, step, ids, *norm), whole)
    assert whole.shape == images.shape and whole.dtype == torch.float32 and whole.isfinite().all()


def test_every_operation_occurs_and_a_quarter_is_erased():
    draws = uniform(0, 5, torch.arange(20_000))
    assert draws.shape == (20_000, DRAWS) and draws.min() >= 0 and draws.max() < 1
    counts = torch.bincount((draws[:, 0] * len(NAMES)).long(), minlength=len(NAMES))
    assert len(counts) == len(NAMES) and counts.min() > 1300 and counts.max() < 1800
    assert float((draws[:, 7] < ERASED).double().mean()) == pytest.approx(ERASED, abs=0.01)
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.04


def test_what_moves_in_from_outside_has_the_mean_color():
    images = torch.ones(1, 1, 20, 20)
    moved = move(images, torch.stack([one("move y", 1), one("identity", 1)], 1), torch.ones(1, 2))
    assert set(moved.unique().tolist()) >= {0.0, 1.0}


def test_an_image_that_nothing_happens_to_stays_as_it_is():
    images, ids = (pictures(300, side=5) * 255 - OFFSET.view(-1, 1, 1)) * GAIN.view(-1, 1, 1), torch.arange(300)
    draws = uniform(1, 2, ids)
    calm = ((draws[:, :2] * len(NAMES)).long() == 0).all(1) & (draws[:, 7] >= ERASED)
    factors = (1 + JITTER * (2 * draws[:, 4:7] - 1)).float()
    assert calm.sum() > 0
    pixels = jitter(pictures(300, side=5), factors)
    expected = (pixels * 255 - OFFSET.view(-1, 1, 1)) * GAIN.view(-1, 1, 1)
    torch.testing.assert_close(distort(images, 1, 2, ids, OFFSET, GAIN)[calm], expected[calm], atol=1e-4, rtol=0)
