"""Contact sheets: rows of framed thumbnails, with captions if wanted, as one image to look at."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

FONT_SIZE = 11
Color = tuple[int, int, int] | str


class Thumbnail(NamedTuple):
    """One image of a contact sheet."""

    image: Image.Image
    frame: Color | None = None  # the color of its frame; None for that of the background
    caption: str = ""


def contact_sheet(
    rows: Sequence[Sequence[Thumbnail]],
    frame: int = 2,
    gap: int = 0,
    caption: int = 0,
    blank: int = 0,
    background: Color = (128, 128, 128),
) -> Image.Image:
    """Draws rows of images of the same size.

    Args:
        rows: from top to bottom; an empty row leaves `blank` pixels free.
        frame: the width of the frames, in pixels.
        gap: pixels between framed images, and around the sheet.
        caption: the height of a caption, in pixels.

    Example:
        >>> black = Thumbnail(Image.new("RGB", (8, 8)))
        >>> contact_sheet([[black] * 3, [black] * 2]).size
        (36, 24)
    """
    width, height = next(row for row in rows if row)[0].image.size
    across, down = width + 2 * frame + gap, height + 2 * frame + caption + gap
    tops = list(accumulate((down if row else blank for row in rows), initial=gap))
    sheet = Image.new("RGB", (max(map(len, rows)) * across + gap, tops[-1]), background)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for row, top in zip(rows, tops):
        for column, thumbnail in enumerate(row):
            left = gap + column * across
            framed = ImageOps.expand(thumbnail.image.convert("RGB"), frame, thumbnail.frame or background)
            sheet.paste(framed, (left, top))
            if thumbnail.caption:
                middle = left + frame + width // 2
                pen.text((middle, top + height + 2 * frame + 1), thumbnail.caption, fill="#333333", font=font, anchor="ma")
    return sheet
