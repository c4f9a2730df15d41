"""A sheet of photographs: rows of framed thumbnails with words below them, as one picture."""

from collections.abc import Sequence
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont

from paper.blocks import Tile
from xbm_app.data.images import Dataset

SIDE, FRAME, WORDS, GAP, BREAK = 88, 4, 15, 5, 14
FRAMES = {
    "anchor": "#e8b93a", "positive": "#6ba85f", "batch": "#9a9a9a", "memory": "#a2719b", "right": "#6ba85f", "wrong": "#a2719b"
}  # the paper's colours  # fmt: skip


def draw_sheet(rows: Sequence[Sequence[Tile]], dataset: Dataset) -> Image.Image:
    """All rows, left to right and top to bottom; an empty one is a break between those before and after it."""
    wide, high = SIDE + 2 * FRAME + GAP, SIDE + 2 * FRAME + WORDS + GAP
    tops = list(accumulate((high if row else BREAK for row in rows), initial=GAP))
    sheet = Image.new("RGB", (max(len(row) for row in rows) * wide + GAP, tops[-1]), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    protocol = dataset.protocols[0]
    sets = {"train": dataset.train, "query": protocol.query, "gallery": protocol.gallery or protocol.query}
    for row, top in zip(rows, tops):
        for c, tile in enumerate(row):
            left = GAP + c * wide
            pen.rectangle((left, top, left + SIDE + 2 * FRAME - 1, top + SIDE + 2 * FRAME - 1), fill=FRAMES[tile.frame])
            picture = sets[tile.part].open(tile.image).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            sheet.paste(picture, (left + FRAME, top + FRAME))
            middle = left + FRAME + SIDE // 2
            pen.text((middle, top + SIDE + 2 * FRAME + 1), tile.words, fill="#333333", font=font, anchor="ma")
    return sheet
