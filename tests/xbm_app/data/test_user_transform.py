"""A transform of the user's own: the same batches whatever the feed and the threads, and an error for what is no image."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from xbm.errors import InputError
from xbm_app.data.feeds import Batches, DecodeFeed, ResidentFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import ShuffleSampler
from xbm_app.data.transforms import Augmentation, describe

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 11, 11, 3), dtype=np.uint8)
IMAGES = ImageSet("seven", np.arange(7) // 2, list("abcd"), pixels=PIXELS)
INDICES = np.array([4, 0, 4, 6])


def feed(transform, kind="crop", of=DecodeFeed, **changes):
    return of(IMAGES, Augmentation(kind, resize=11, crop=7, transform=transform, **changes), seed=3)


def noisy(image):
    """Draws from all three global generators."""
    shift = random.randrange(50) + np.random.randint(50) + int(torch.randint(50, ()))
    return image.point(lambda value: (value + shift) % 256)


def test_a_transform_that_changes_nothing_changes_no_batch():
    for kind in ("crop", "resized_crop", "none"):
        plain, same = (feed(transform, kind).train(INDICES, 5) for transform in (None, lambda image: image))
        assert torch.equal(plain, same), kind


def test_a_batch_depends_on_seed_step_and_image_alone():
    one = feed(noisy).train(INDICES, 5)
    random.seed(99), np.random.seed(98), torch.manual_seed(97)
    assert torch.equal(feed(noisy, of=ResidentFeed).train(INDICES, 5), one)
    assert torch.equal(feed(noisy).train(INDICES[2:], 5), one[2:]) and not torch.equal(feed(noisy).train(INDICES, 6), one)
    unflipped = feed(noisy, "none").train(INDICES, 5)
    assert torch.equal(unflipped[0], unflipped[2]), "an image twice in a batch"


def test_the_model_draws_the_same_random_numbers_as_without_a_transform():
    before = [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    feed(noisy).train(INDICES, 5)
    assert [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()] == before


def test_batches_do_not_depend_on_the_number_of_threads():
    def batches(workers):
        made = Batches(feed(noisy), ShuffleSampler(7, 3, seed=0), stop_step=4, workers=workers)
        return [images for _, images, _, _ in made]

    for one, other in zip(batches(0), batches(3)):
        assert torch.equal(one, other)


def test_testing_sees_the_images_as_they_are():
    assert torch.equal(feed(noisy).test(INDICES), feed(None).test(INDICES))


@pytest.mark.parametrize(
    "same",
    [
        np.asarray, v2.PILToTensor(), v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
        lambda image: image.convert("RGBA"),
    ],
)  # fmt: skip
def test_images_arrays_and_tensors_are_taken(same):
    assert torch.equal(feed(same).train(INDICES, 5), feed(None).train(INDICES, 5))


def test_a_gray_model_gets_gray_images():
    modes = set()
    gray = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    batch = feed(lambda image: modes.add(image.mode) or image, **gray).train(INDICES, 5)
    assert modes == {"L"} and torch.equal(batch, feed(None, **gray).train(INDICES, 5))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda image: None, "the transform returns NoneType: return a PIL image"),
        (lambda image: np.zeros((9, 9)), r"the transform returns float64 \(9, 9\)"),
        (v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]), "omit Normal"),
        (lambda image: image.resize((9, 5)), "images of 5 pixels, smaller than data.crop=7"),
    ],
)
def test_what_is_no_image_for_the_model_is_refused(transform, message):
    with pytest.raises(InputError, match=message):
        feed(transform).train(INDICES, 5)


def test_a_description_says_what_is_known_and_no_address():
    assert describe(v2.RandomInvert(p=0.25)) == "RandomInvert(p=0.25)"
    assert describe(v2.Compose([v2.RandomInvert(p=1.0), v2.RandomVerticalFlip()])).count("\n") == 0
    assert describe(noisy).endswith("test_user_transform.noisy")
    assert describe(v2.Lambda(lambda image: image)) == describe(v2.Lambda(lambda image: image))
    assert describe(Image.Image.copy).endswith("Image.copy")
