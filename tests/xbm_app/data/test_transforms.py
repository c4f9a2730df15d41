import numpy as np
import pytest
import torch
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.transforms import (
    OFFICIAL,
    PAPER,
    Augmentation,
    Windows,
    as_channels,
    centre_params,
    crop_params,
    cut,
    cut_resident,
    fit,
    longest_window,
    normalisation,
)

SHIFT = Augmentation("shift", resize=13, crop=11, padding=3, flip=True)


def sides(count, height, width):
    return torch.full((count,), height), torch.full((count,), width)


def picture(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def windows(*rows):
    return Windows(*torch.tensor(rows).T)


@pytest.mark.parametrize("augmentation", [PAPER, OFFICIAL, SHIFT])
def test_windows_depend_on_seed_step_and_id_alone(augmentation):
    ids = torch.arange(40)
    heights, widths = 256 + ids * 3, 256 + ids
    all_of_them = crop_params(3, 17, ids, heights, widths, augmentation)
    some = torch.tensor([31, 2, 7])
    in_another_batch = crop_params(3, 17, some, heights[some], widths[some], augmentation)
    for whole, part in zip(all_of_them, in_another_batch):
        assert torch.equal(whole[some], part)
    with_step_on_device = crop_params(3, torch.tensor(17), ids, heights, widths, augmentation)
    assert all(torch.equal(a, b) for a, b in zip(all_of_them, with_step_on_device))
    for seed, step in ((4, 17), (3, 18)):
        assert not torch.equal(all_of_them.top, crop_params(seed, step, ids, heights, widths, augmentation).top)


def test_windows_are_the_same_on_every_machine():
    found = crop_params(1, 2, torch.tensor([0, 9]), *sides(2, 256, 256), PAPER)
    assert [each.tolist() for each in found] == [[4, 26], [19, 19], [224, 224], [224, 224], [1, 1]]
    found = crop_params(1, 2, torch.tensor([0, 9]), *sides(2, 256, 341), OFFICIAL)
    assert [each.tolist() for each in found] == [[1, 57], [65, 85], [247, 185], [234, 198], [1, 1]]


def test_crops_are_uniform_and_half_are_mirrored():
    count = 33 * 1000
    top, left, height, width, flip = crop_params(0, 5, torch.arange(count), *sides(count, 256, 256), PAPER)
    for place in (top, left):
        counts = torch.bincount(place, minlength=33)
        assert len(counts) == 33  # 0 to 32, both reached
        assert counts.min() > 850 and counts.max() < 1150
    assert (height == 224).all() and (width == 224).all()
    assert abs(flip.double().mean() - 0.5) < 0.02
    together = torch.stack([top.double(), left.double(), flip.double()])
    assert torch.corrcoef(together).fill_diagonal_(0).abs().max() < 0.03


def test_the_test_window_is_the_centre():
    found = centre_params(torch.tensor([256, 301]), torch.tensor([256, 256]), PAPER)
    assert [each.tolist() for each in found] == [[16, 38], [16, 16], [224, 224], [224, 224], [0, 0]]


def test_without_augmentation_training_sees_the_test_window():
    plain = Augmentation("none", resize=20, crop=13)
    found = crop_params(0, 1, torch.arange(50), *sides(50, 20, 20), plain)
    assert all(torch.equal(a, b) for a, b in zip(found, centre_params(*sides(50, 20, 20), plain)))


def test_shifts_reach_every_offset_up_to_the_padding():
    top, left, *_ = crop_params(0, 0, torch.arange(900), *sides(900, 13, 13), SHIFT)
    assert sorted(set(top.tolist())) == sorted(set(left.tolist())) == [-2, -1, 0, 1, 2, 3, 4]


def test_resized_crops_have_the_asked_area_and_aspect_and_stay_inside():
    count = 20_000
    heights, widths = sides(count, 256, 341)
    top, left, height, width, _ = crop_params(0, 3, torch.arange(count), heights, widths, OFFICIAL)
    assert (top >= 0).all() and (left >= 0).all() and (height >= 1).all() and (width >= 1).all()
    assert (top + height <= 256).all() and (left + width <= 341).all()
    area, aspect = height * width / (256 * 341), width / height
    assert area.min() > 0.195 and area.max() <= 1.0 and area.min() < 0.21 and area.max() > 0.95
    assert aspect.min() > 0.74 and aspect.max() < 1.35
    small = area < 0.5  # every aspect fits there
    assert abs(aspect[small].log().mean()) < 0.01
    assert abs(aspect[small].log().std() - 2 * np.log(4 / 3) / 12**0.5) < 0.005
    assert max(height.max(), width.max()) <= longest_window(OFFICIAL)


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(256, 1024, (256, 341)), (1024, 256, (341, 256)), (60, 60, (60, 60))]
)
def test_a_part_that_never_fits_falls_back_to_the_largest_centre(height, width, expected):
    whole = Augmentation("resized_crop", resize=60, crop=50, scale=(1.0, 1.0))
    found = crop_params(0, 0, torch.arange(200), *sides(200, height, width), whole)
    missed = (found.height == expected[0]) & (found.width == expected[1])
    assert missed.any()
    assert (found.top[missed] == (height - expected[0]) // 2).all()
    assert (found.left[missed] == (width - expected[1]) // 2).all()


def test_fit_makes_squares_or_keeps_the_aspect():
    image = Image.fromarray(picture(30, 50))
    assert fit(image, 16, "square").shape == (16, 16, 3)
    assert fit(image, 16, "shorter").shape == (16, 26, 3)
    assert fit(image.transpose(Image.Transpose.ROTATE_90), 16, "shorter").shape == (26, 16, 3)
    expected = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR))
    assert np.array_equal(fit(image, 16, "square"), expected)
    assert np.array_equal(fit(Image.fromarray(picture(9, 9)), 9, "shorter"), picture(9, 9))


@pytest.mark.parametrize("turn", [False, True])
def test_a_strip_is_cut_to_its_centre_before_it_fills_the_memory(turn):
    strip = np.zeros((2, 800, 3), np.uint8)
    strip[:, 396:404] = 255
    strip = strip.transpose(1, 0, 2) if turn else strip
    found = fit(Image.fromarray(strip), 10, "shorter")
    assert found.shape == ((40, 10, 3) if turn else (10, 40, 3))
    assert (found == 255).all()


def test_grey_is_pillows_luma_and_colour_of_grey_is_grey():
    image = picture(9, 14)
    assert np.array_equal(as_channels(image, 1)[..., 0], np.asarray(Image.fromarray(image).convert("L")))
    grey = picture(9, 14, 1)[..., 0]
    assert np.array_equal(as_channels(grey, 1), grey[..., None])
    assert np.array_equal(as_channels(as_channels(grey, 3), 1), grey[..., None])


def test_cut_is_crop_flip_and_normalise():
    augmentation = Augmentation(resize=20, crop=13)
    images = [picture(20, 20, seed=seed) for seed in range(3)]
    found = cut(images, windows((0, 7, 13, 13, 0), (5, 0, 13, 13, 1), (7, 3, 13, 13, 1)), augmentation)
    assert found.shape == (3, 3, 13, 13) and found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(each)[:, None, None] for each in (augmentation.mean, augmentation.std))
    for image, (top, left, flip), tensor in zip(images, ((0, 7, 0), (5, 0, 1), (7, 3, 1)), found):
        expected = torch.from_numpy(image[top : top + 13, left : left + 13]).permute(2, 0, 1).float() / 255
        expected = (expected.flip(-1) if flip else expected).sub(mean).div(std)
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-6)


def test_weights_that_want_pixels_minus_127_over_128_get_exactly_that():
    lite = Augmentation("none", resize=16, crop=16, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
    image = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    found = cut([image], centre_params(*sides(1, 16, 16), lite), lite)
    assert torch.equal(found[0, 1].flatten(), (torch.arange(256).float() - 127) / 128)


def test_a_shift_beyond_the_edge_repeats_the_edge():
    image = picture(13, 13)
    found = cut([image, image], windows((-2, 4, 11, 11, 0), (4, -2, 11, 11, 1)), SHIFT)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="edge")
    same = cut([padded, padded], windows((2, 8, 11, 11, 0), (8, 2, 11, 11, 1)), SHIFT)
    assert torch.equal(found, same)


def test_a_resized_window_is_resized_as_pillow_does():
    augmentation = Augmentation("resized_crop", resize=60, crop=31)
    smooth = np.asarray(Image.fromarray(picture(7, 9)).resize((83, 60), Image.Resampling.BICUBIC))
    found = cut([smooth], windows((5, 11, 52, 47, 1)), augmentation)
    part = Image.fromarray(smooth).crop((11, 5, 58, 57)).resize((31, 31), Image.Resampling.BILINEAR)
    expected = cut([np.asarray(part)], windows((0, 0, 31, 31, 1)), augmentation)
    grey_levels = (found - expected).abs() * torch.tensor(augmentation.std)[:, None, None] * 255
    assert grey_levels.max() < 1.01


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["crop", "shift", "none", "resized_crop"])
def test_the_batched_cut_for_devices_equals_the_one_for_main_memory(kind, channels):
    norm = {"mean": (0.4, 0.5, 0.6)[:channels], "std": (0.2, 0.3, 0.25)[:channels], "channels": channels}
    augmentation = Augmentation(kind, resize=40, crop=33, padding=5 if kind == "shift" else 0, **norm)
    shapes = [(40, 47), (53, 40), (40, 40), (40, 160)] * 5
    images = [picture(*shape, channels, seed=seed) for seed, shape in enumerate(shapes)]
    heights, widths = torch.tensor(shapes).T
    found = crop_params(6, 2, torch.arange(len(images)), heights, widths, augmentation)
    starts = (heights * widths).cumsum(0) - heights * widths
    table = torch.from_numpy(np.concatenate([image.reshape(-1, channels) for image in images]))
    on_device = tuple(torch.from_numpy(each) for each in normalisation(augmentation))
    reach = longest_window(augmentation)
    batched = cut_resident(table, starts, heights, widths, found, augmentation.crop, on_device, reach)
    one_by_one = cut(images, found, augmentation)
    if kind != "resized_crop":
        assert torch.equal(batched, one_by_one)
    else:
        grey_levels = (batched - one_by_one).abs() * torch.tensor(augmentation.std)[:, None, None] * 255
        assert grey_levels.max() < 1.01
        assert (grey_levels > 0.5).float().mean() < 0.25
    assert batched.is_contiguous(memory_format=torch.channels_last)


def test_impossible_augmentations_are_refused():
    for wrong, message in (
        ({"kind": "croop"}, "did you mean 'crop'"),
        ({"resize": 200}, r"crop must be between 1 and resize \(200\)"),
        ({"channels": 2}, "channels must be 1 or 3"),
        ({"channels": 1}, "one value per channel"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be positive"),
        ({"padding": 2}, "padding must be 0"),
        ({"scale": (0.5, 0.2)}, "ascending order"),
    ):
        with pytest.raises(InputError, match=message):
            Augmentation(**wrong)
