"""Contact sheets: many small images on one picture, for looking at what a number cannot say."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

GAP = 2  # pixels between images, or the width of a frame
GROUND = (128, 128, 128)


def contact_sheet(
    images: Sequence[np.ndarray], columns: int, frames: Sequence[tuple[int, int, int] | None] | None = None
) -> Image.Image:
    """Images of one size, row by row.

    Args:
        images: arrays (H, W) or (H, W, 3) uint8.
        columns: images per row.
        frames: a colour for the frame of each image, None for no frame.

    Example:
        >>> contact_sheet([np.zeros((8, 8), np.uint8)] * 5, columns=3).size
        (36, 24)
    """
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + 2 * GAP), rows * (height + 2 * GAP)), GROUND)
    for k, image in enumerate(images):
        colour = frames[k] if frames is not None else None
        framed = ImageOps.expand(Image.fromarray(image).convert("RGB"), GAP, colour or GROUND)
        sheet.paste(framed, (k % columns * framed.width, k // columns * framed.height))
    return sheet
