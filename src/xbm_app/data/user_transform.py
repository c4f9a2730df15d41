"""A user's own transform of the training images, whose random numbers depend on (seed, step, instance) only."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xbm.errors import InputError
from xbm_app.data.samplers import scramble, stream

Transform = Callable[[Any], Any]  # from a PIL image to one, or to an array or tensor of its pixels

DRAW = 48  # the draw that seeds the generators; those before are of windows and distortions
ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)  # in the text of an object without one of its own
LONGEST = 1000  # characters of a description


def describe(transform: Transform) -> str:
    """What a run records: the text of a transform that has one, as those of torchvision, or else its name.

    Example:
        >>> def brighter(image):
        ...     return image.point(lambda value: 2 * value)
        >>> describe(brighter).endswith(".brighter")
        True
    """
    text = " ".join(repr(transform).split())
    if ADDRESS.search(text):
        named = transform if hasattr(transform, "__qualname__") else type(transform)
        text = f"{named.__module__}.{named.__qualname__}"
    return text[:LONGEST]


def seeds_of(seed: int, step: int, ids: Tensor) -> list[int]:
    """One seed per image: 63 random bits."""
    words = scramble(scramble(stream(seed, step, ids.cpu()) ^ DRAW))
    return [word & (1 << 63) - 1 for word in words.tolist()]


@contextmanager
def global_generators() -> Iterator[None]:
    """Leaves the global generators of Python, NumPy and torch as they were: the model draws from the last one."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)


def transformed(transform: Transform, pixels: np.ndarray, seed: int) -> np.ndarray:
    """What a transform makes of an image; call it within `global_generators`.

    Args:
        pixels: (h, w, C) uint8, 1 or 3 channels.

    Returns:
        (h, w) or (h, w, 3) uint8.

    Raises:
        InputError: the result is no image.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
    result = transform(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    if isinstance(result, Image.Image):
        return np.asarray(result if result.mode in ("L", "RGB") else result.convert("RGB"))
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.numel() and not 0 <= result.min() <= result.max() <= 1:
            raise InputError("the transform returns values outside of 0 to 1: omit Normalize, xbm normalizes by itself")
        values = (result * 255).round().byte() if result.is_floating_point() else result
        result = values.movedim(0, -1).cpu().numpy() if values.dim() == 3 else values.cpu().numpy()
    if isinstance(result, np.ndarray) and result.dtype == np.uint8:
        if result.ndim == 3 and result.shape[2] == 1:
            result = result[..., 0]
        if result.ndim == 2 or (result.ndim == 3 and result.shape[2] == 3):
            return np.ascontiguousarray(result)
    what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
    raise InputError(
        f"the transform returns {what}: return a PIL image, a uint8 array (h, w, 3), or a tensor (3, h, w) from 0 to 1"
    )
