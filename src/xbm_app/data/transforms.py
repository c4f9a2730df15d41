"""Resizing and augmentation: resize the image, apply the user's own transform, crop a window, flip, normalize.

The window is a function of (seed, step, instance id), so workers, ranks and devices agree on it. The random numbers of the
user's transform depend on these only, too.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from xbm.errors import InputError, unknown
from xbm_app.data.decoding import INTERPOLATIONS, fit
from xbm_app.data.images import EncodedSet, ImageSet
from xbm_app.data.samplers import scramble, stream

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
KINDS = ("crop", "resized_crop", "shift", "none")
MODES = ("square", "shorter")
TRIES, FIRST_TRY = 10, 3  # of a random resized crop; the first draws are flip, top, left

Transform = Callable[[Any], Any]  # from a PIL image to one, or to an array or tensor of its pixels
TRANSFORM_DRAW = 48  # the draw that seeds the generators; those before are of windows and distortions
ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)  # in the text of an object without one of its own
LONGEST_DESCRIPTION = 1000  # characters


@dataclass(frozen=True)
class Augmentation:
    """How an image is turned into the model's input. The default is the paper's; `OFFICIAL` is that of its released code.

    Attributes:
        kind: in training,
            "crop": a random window of `crop`² out of `resize`²;
            "resized_crop": the shorter side is resized to `resize`, then a random window with `scale` of the area and an
            aspect ratio of 3:4 to 4:3 is resized to `crop`²;
            "shift": the center window of `crop`² out of `resize`², moved by up to `padding` pixels in each direction, with
            edge pixels repeated;
            "none": the center window, as always in testing.
        flip: whether half of the images, chosen at random, are mirrored in training.
        mean, std: of each channel, for pixels from 0 to 1.
        channels: 3, or 1 for grayscale.
        interpolation: "bilinear" or "bicubic": how the image is resized.
        strong: whether windows are also distorted in training; see `xbm_app.data.distortions`.
        transform: of the user's own, which sees the resized training images before a window is cropped, or None.
    """

    kind: str = "crop"
    resize: int = 256
    crop: int = 224
    flip: bool = True
    padding: int = 0
    scale: tuple[float, float] = (0.2, 1.0)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    channels: int = 3
    interpolation: str = "bilinear"
    strong: bool = field(default=False, repr=False)  # an index knows a model by its repr: only what matters in testing
    transform: Transform | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("augmentation", self.kind, KINDS)
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        if not 1 <= self.crop <= self.resize:
            raise InputError(f"crop must be between 1 and resize ({self.resize}), got {self.crop}")
        if self.channels not in (1, 3):
            raise InputError(f"channels must be 1 or 3, got {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels:
            raise InputError(
                f"mean and std must have one value per channel ({self.channels}), got {len(self.mean)} and {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise InputError(f"std must be positive, got {min(self.std)}")
        if self.padding < 0 or (self.padding and self.kind != "shift"):
            raise InputError(f"padding must be 0, or positive with kind 'shift', got {self.padding} with {self.kind!r}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise InputError(f"scale must be two fractions of the area in ascending order, got {self.scale}")

    @property
    def mode(self) -> str:
        """How the image is resized before the window is cropped; see `fit`."""
        return "shorter" if self.kind == "resized_crop" else "square"


PAPER = Augmentation()
OFFICIAL = Augmentation(kind="resized_crop")


def resized(images: ImageSet, size: int, mode: str, index: int, interpolation: str = "bilinear") -> np.ndarray:
    """Decodes and resizes one image with `fit`.  # (h, w, 3) uint8; (h, w) is possible for generated images"""
    if images.pixels is not None and images.pixels.shape[1:3] == (size, size):
        return images.pixels[index]
    if isinstance(images, EncodedSet) and (pixels := images.quick_pixels(index, size)) is not None:
        return pixels
    # Decoding at 2 × size or more changed the result by 1/3 gray level on average and by at most 3; decoding at `size` or
    # more changed it by up to 15.
    return fit(images.open(index, at_least=2 * size), size, mode, interpolation)


def as_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Converts pixels (h, w) or (h, w, 1 or 3) to `channels` channels; gray is Pillow's luma.  # (h, w, C)"""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
    luma = pixels.astype(np.int32) @ np.array([19595, 38470, 7471], np.int32)
    return ((luma + 0x8000) >> 16).astype(np.uint8)[..., None]


class Windows(NamedTuple):
    """The window of each image, in its pixels, and whether it is mirrored: five (B,) int64 tensors."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


def centre_params(heights: Tensor, widths: Tensor, augmentation: Augmentation) -> Windows:
    """Returns the windows for testing: the center, not mirrored."""
    size = torch.full_like(heights, augmentation.crop)
    return Windows((heights - size) // 2, (widths - size) // 2, size, size, torch.zeros_like(heights))


def crop_params(
    seed: int, step: int | Tensor, ids: Tensor, heights: Tensor, widths: Tensor, augmentation: Augmentation
) -> Windows:
    """Returns the windows for training at `step`, one per instance.

    All tensors are (B,) int64 on one device, where `step` may be too. Nothing waits for the host, and every device gives
    the same windows, bit for bit.
    """
    lanes = FIRST_TRY + (2 * TRIES if augmentation.kind == "resized_crop" else 0)
    draws = scramble(stream(seed, step, ids)[:, None] ^ torch.arange(lanes, device=ids.device))  # (B, lanes)

    def below(count: Tensor | int, lane: int) -> Tensor:
        """A random number from 0 to count - 1."""
        return (((draws[:, lane] >> 33) & 0x7FFFFFFF) * count) >> 31

    top, left, height, width, flip = centre_params(heights, widths, augmentation)
    if augmentation.flip and augmentation.kind != "none":
        flip = below(2, 0)
    if augmentation.kind == "resized_crop":
        height, width, fits = _parts(draws[:, FIRST_TRY:], heights, widths, augmentation)
        top = torch.where(fits, below(heights - height + 1, 1), (heights - height) // 2)
        left = torch.where(fits, below(widths - width + 1, 2), (widths - width) // 2)
    elif augmentation.kind == "crop":
        top, left = below(heights - height + 1, 1), below(widths - width + 1, 2)
    elif augmentation.kind == "shift":
        moves = 2 * augmentation.padding + 1
        top, left = top + below(moves, 1) - augmentation.padding, left + below(moves, 2) - augmentation.padding
    return Windows(top, left, height, width, flip)


def _parts(draws: Tensor, heights: Tensor, widths: Tensor, augmentation: Augmentation) -> tuple[Tensor, Tensor, Tensor]:
    """Returns heights and widths of random resized crops, and whether a try fitted; otherwise the largest allowed window.

    The scheme is torchvision's. Only correctly rounded operations are used, so that all devices agree: no logarithm, and no
    division by a constant, which some devices turn into a multiplication.

    Args:
        draws: (B, 2·TRIES) random words.
    """
    low, high = augmentation.scale
    units = ((draws >> 11) & ((1 << 53) - 1)).double() * 2.0**-53  # in [0, 1)
    area = (heights * widths)[:, None] * (low + (high - low) * units[:, :TRIES])
    # (1 + t) / (1 - t), t uniform in ±1/7, runs from 3/4 to 4/3 and is log-uniform within 2 %.
    t = (2 * units[:, TRIES:] - 1) * (1 / 7)
    tries = torch.stack([area * (1 - t) / (1 + t), area * (1 + t) / (1 - t)]).sqrt().add(0.5).floor().long()
    largest = torch.stack([heights, widths])
    fits = ((tries >= 1) & (tries <= largest[..., None])).all(dim=0)  # (B, TRIES)
    chosen = tries.gather(2, fits.int().argmax(dim=1)[None, :, None].expand(2, -1, 1))[..., 0]  # the first that fits
    fitted = fits.any(dim=1)
    fallback = torch.minimum(largest, (largest.flip(0) * 8 + 3) // 6)
    height, width = torch.where(fitted, chosen, fallback)
    return height, width, fitted


def cut(images: Sequence[np.ndarray], windows: Windows, augmentation: Augmentation) -> Tensor:
    """Crops, mirrors and normalizes windows of images in main memory.

    Args:
        images: B arrays (h, w, C) uint8, contiguous, C = augmentation.channels.

    Returns:
        (B, C, crop, crop) float32, channels last in memory, as the pixels are.
    """
    size, C = augmentation.crop, augmentation.channels
    offset, gain = (np.tile(each, size) for each in normalisation(augmentation))
    mirrored = np.arange(size * C).reshape(size, C)[::-1].reshape(-1)
    # NumPy requests huge pages and torch does not: page faults of a new torch tensor cost twice as much as all the
    # arithmetic.
    out = np.empty((len(images), size, size * C), np.float32)
    for image, row, top, left, height, width, flip in zip(images, out, *(each.tolist() for each in windows)):
        pixels = _window(image, top, left, height, width, size)
        if flip:
            pixels = pixels.take(mirrored, axis=1)
        np.subtract(pixels, offset, out=row)
        np.multiply(row, gain, out=row)
    return torch.from_numpy(out.reshape(len(images), size, size, C)).permute(0, 3, 1, 2)


def normalisation(augmentation: Augmentation) -> tuple[np.ndarray, np.ndarray]:
    """Returns offset and gain such that (pixel - offset) · gain is (pixel / 255 - mean) / std in float32.  # (C,), (C,)"""
    mean, std = np.array(augmentation.mean), np.array(augmentation.std)
    return (255 * mean).astype(np.float32), (1 / (255 * std)).astype(np.float32)


def _window(image: np.ndarray, top: int, left: int, height: int, width: int, size: int) -> np.ndarray:
    """Returns the window of one image as rows of bytes, without a copy where possible.  # (size, size·C) uint8"""
    h, w, C = image.shape
    if (height, width) != (size, size):
        part = torch.from_numpy(image[top : top + height, left : left + width].copy())
        part = part[None].permute(0, 3, 1, 2)  # torch recognizes this as channels-last and returns the same
        part = F.interpolate(part, (size, size), mode="bilinear", antialias=True, align_corners=False)
        return part.permute(0, 2, 3, 1).numpy().reshape(size, size * C)
    if 0 <= top <= h - size and 0 <= left <= w - size:
        return image.reshape(h, w * C)[top : top + size, left * C : (left + size) * C]
    rows, columns = np.clip(top + np.arange(size), 0, h - 1), np.clip(left + np.arange(size), 0, w - 1)
    return image.take(rows, axis=0).take(columns, axis=1).reshape(size, size * C)


def cut_resident(
    table: Tensor,
    starts: Tensor,
    heights: Tensor,
    widths: Tensor,
    windows: Windows,
    size: int,
    norm: tuple[Tensor, Tensor],
    reach: int = 0,
) -> Tensor:
    """`cut` for images that are stored one after the other on a device: a few kernels per batch, no wait for the host.

    Equal to `cut` bit for bit, except that a resized window may differ by one gray level (its sums are rounded differently).

    Args:
        table: (pixels of all images, C) uint8.
        starts: (B,) the first pixel of each image in `table`.
        heights, widths: (B,) of the images.
        norm: `normalisation` on the device.
        reach: 0 if every window is size × size; otherwise the longest possible side of a window, and all are resized.
    """
    offset, gain = norm
    step = torch.arange(reach or size, device=table.device)
    column = step.expand(len(starts), -1)
    if not reach:
        column = torch.where(windows.flip[:, None] > 0, size - 1 - column, column)
    rows = (windows.top[:, None] + step).clamp(min=0).minimum(heights[:, None] - 1)
    columns = (windows.left[:, None] + column).clamp(min=0).minimum(widths[:, None] - 1)
    pixels = table[starts[:, None, None] + rows[:, :, None] * widths[:, None, None] + columns[:, None, :]]
    if reach:
        with torch.autocast(table.device.type, enabled=False):
            down = _resample(windows.height, torch.zeros_like(windows.flip), size, reach)
            across = _resample(windows.width, windows.flip, size, reach)
            resized = down[:, None] @ pixels.permute(0, 3, 1, 2).float() @ across[:, None].mT  # (B, C, size, size)
        pixels = resized.round_().permute(0, 2, 3, 1).contiguous()
    return torch.sub(pixels, offset).mul_(gain).permute(0, 3, 1, 2)


def _resample(length: Tensor, flip: Tensor, size: int, reach: int) -> Tensor:
    """Returns the weights that resize the first `length` of `reach` pixels to `size`, antialiased.  # (B, size, reach)"""
    scale = length.float()[:, None, None] / size
    out = torch.arange(size, device=length.device).expand(len(length), -1)
    out = torch.where(flip[:, None] > 0, size - 1 - out, out)
    source = torch.arange(reach, device=length.device)
    distance = (source + 0.5 - (out[..., None] + 0.5) * scale).abs() / scale.clamp(min=1)
    weight = (1 - distance).clamp(min=0) * (source < length[:, None, None])
    return weight / weight.sum(-1, keepdim=True)


def longest_window(augmentation: Augmentation) -> int:
    """Returns `reach` for training windows: 0 if none is resized, otherwise 4/3 of the shorter side, rounded up."""
    return -(-augmentation.resize * 4 // 3) + 1 if augmentation.kind == "resized_crop" else 0


# ------------------------------------------------------------------ a transform of the user's own


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
    return text[:LONGEST_DESCRIPTION]


def seeds_of(seed: int, step: int, ids: Tensor) -> list[int]:
    """One seed per image: 63 random bits."""
    words = scramble(scramble(stream(seed, step, ids.cpu()) ^ TRANSFORM_DRAW))
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
