"""The distortions of the augmentation `strong`: two operations of RandAugment, color jitter and random erasing.

All images of a batch are distorted together, on any device, without waiting for the host. What happens to an image is a
function of (seed, step, instance id). torchvision has the same operations with one strength for all images of a call; the
tests compare the two.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from xbm_app.data.samplers import scramble, stream

FIRST_DRAW, DRAWS = 32, 12  # the draws before are those of the window, those from 64 on are the sampler's
OPERATIONS = 2  # per image
STRENGTH = 9 / 30  # the usual magnitude, of 30
# Those of RandAugment without Equalize, which needs a histogram of each image. The first one changes nothing.
GEOMETRIC = ("shear x", "shear y", "move x", "move y", "rotate")
COLOR = ("brightness", "saturation", "contrast", "sharpness", "posterize", "solarize", "autocontrast")
NAMES = ("identity", *GEOMETRIC, *COLOR)
SHEAR, MOVE, TURN, BLEND = 0.3, 150 / 331, math.radians(30), 0.9  # at full strength; MOVE: of the side
BITS = 8 - round(STRENGTH * 4)  # that posterize keeps
JITTER = 0.2  # of brightness, contrast and saturation
ERASED = 0.25  # share of the images of which a rectangle is erased
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), 3.3  # share of the area; longest to shorter side
CACHED = 2  # images that a CPU distorts at a time, so that they stay in its cache: three times as fast as all together
LUMA = (0.2989, 0.587, 0.114)


def distort(images: Tensor, seed: int, step: int | Tensor, ids: Tensor, offset: Tensor, gain: Tensor) -> Tensor:
    """Distorts a batch of normalized images; what moves in from outside, or is erased, has the mean color.

    Args:
        images: (B, C, H, W) float32: (pixel - offset) · gain, for pixels from 0 to 255.
        step: of the batch; a tensor on the same device if `ids` is one there.
        ids: (B,) int64, the instances.
        offset, gain: (C,), on the device of the images.

    Returns:
        (B, C, H, W) float32, normalized.
    """
    draws = uniform(seed, step, ids).to(images.device, torch.float32)  # (B, DRAWS)
    mean, std = (offset / 255).view(-1, 1, 1), (1 / (255 * gain)).view(-1, 1, 1)
    size = CACHED if images.device.type == "cpu" else max(1, len(images))
    parts = zip(images.contiguous().split(size), draws.split(size))
    return torch.cat([_distort(part, those, mean, std) for part, those in parts])


def _distort(images: Tensor, draws: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    operations = (draws[:, :OPERATIONS] * len(NAMES)).long()
    signs = (draws[:, OPERATIONS : 2 * OPERATIONS] < 0.5).float() * 2 - 1
    images = move(images, operations, signs) * std + mean
    for operation, sign in zip(operations.T, signs.T):
        images = recolor(images, operation, 1 + sign * BLEND * STRENGTH)
    rest = draws[:, 2 * OPERATIONS :]
    images = jitter(images, 1 + JITTER * (2 * rest[:, :3] - 1))
    return erase((images - mean) / std, rest[:, 3:8])


def uniform(seed: int, step: int | Tensor, ids: Tensor) -> Tensor:
    """Random numbers in [0, 1), the same on every device.  # (B, DRAWS) float64"""
    lanes = torch.arange(FIRST_DRAW, FIRST_DRAW + DRAWS, device=ids.device)
    return ((scramble(stream(seed, step, ids)[:, None] ^ lanes) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def move(images: Tensor, operations: Tensor, signs: Tensor) -> Tensor:
    """Applies the geometric operations of each image, as one affine transformation about its center."""
    theta = torch.eye(3, device=images.device).expand(len(images), 3, 3)
    for operation, sign in zip(operations.T, signs.T):
        theta = theta @ affine(operation, sign * STRENGTH)
    # (x, y) from -1 to 1 in the output to the same in the input; all images are square
    grid = F.affine_grid(theta[:, :2], list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def affine(operation: Tensor, strength: Tensor) -> Tensor:
    """The matrices of one geometric operation per image, the identity for all others.  # (B, 3, 3)"""
    zero = torch.zeros_like(strength)

    def only(name: str, value: Tensor) -> Tensor:
        return torch.where(operation == NAMES.index(name), value, zero)

    turn = only("rotate", strength * TURN)
    cos, sin = turn.cos(), turn.sin()
    rows = [
        cos, only("shear x", strength * SHEAR) - sin, only("move x", strength * 2 * MOVE),
        only("shear y", strength * SHEAR) + sin, cos, only("move y", strength * 2 * MOVE),
        zero, zero, zero + 1,
    ]  # fmt: skip
    return torch.stack(rows, dim=1).view(-1, 3, 3)


def recolor(images: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Applies one operation on colors per image, to pixels from 0 to 1; all others leave an image as it is."""
    which, factor = operation.view(-1, 1, 1, 1), factor.view(-1, 1, 1, 1)

    def of(name: str) -> Tensor:
        return which == NAMES.index(name)

    gray = luma(images)
    toward = torch.where(of("saturation"), gray, torch.where(of("contrast"), gray.mean((2, 3), keepdim=True), 0))
    toward = torch.where(of("sharpness"), smooth(images), toward)
    blends = of("brightness") | of("saturation") | of("contrast") | of("sharpness")
    lowest, highest = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = highest <= lowest
    changed = torch.where(blends, blend(images, toward, factor), images)
    changed = torch.where(of("posterize"), (images * 255).floor().div(1 << 8 - BITS).floor() * ((1 << 8 - BITS) / 255), changed)
    changed = torch.where(of("solarize") & (images >= 1 - STRENGTH), 1 - images, changed)
    stretched = (images - lowest) / torch.where(flat, 1, highest - lowest)
    return torch.where(of("autocontrast") & ~flat, stretched, changed)


def jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Changes brightness, contrast and saturation of each image by its factors (B, 3)."""
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    images = blend(images, torch.zeros_like(brightness), brightness)
    images = blend(images, luma(images).mean((2, 3), keepdim=True), contrast)
    return blend(images, luma(images), saturation)


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(images), images, factor).clamp_(0, 1)


def luma(images: Tensor) -> Tensor:
    """(B, 1, H, W): the brightness of each pixel."""
    if images.shape[1] != len(LUMA):
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def smooth(images: Tensor) -> Tensor:
    """Averages 3 × 3 pixels, the center with 5 times the weight; the border stays as it is."""
    kernel = torch.ones(3, 3, device=images.device)
    kernel[1, 1] = 5
    channels = images.shape[1]
    inner = F.conv2d(images, (kernel / kernel.sum()).expand(channels, 1, 3, 3), groups=channels)
    smoothed = images.clone()
    smoothed[:, :, 1:-1, 1:-1] = inner
    return smoothed


def erase(images: Tensor, draws: Tensor) -> Tensor:
    """Sets a rectangle of some images to 0, the mean color: (whether, area, ratio, top, left) from draws (B, 5) in [0, 1)."""
    whether, area, ratio, top, left = draws.unbind(1)
    height, width = images.shape[2:]
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area) * height * width
    ratio = torch.exp((2 * ratio - 1) * math.log(ERASED_RATIO))
    tall, wide = (area * ratio).sqrt().clamp(max=height), (area / ratio).sqrt().clamp(max=width)
    top, left = top * (height - tall), left * (width - wide)
    y, x = (torch.arange(side, device=images.device) + 0.5 for side in (height, width))
    rows = (y >= top[:, None]) & (y < (top + tall)[:, None])  # (B, H)
    columns = (x >= left[:, None]) & (x < (left + wide)[:, None])
    erased = (whether < ERASED)[:, None, None] & rows[:, :, None] & columns[:, None, :]
    return images.masked_fill(erased[:, None], 0)
