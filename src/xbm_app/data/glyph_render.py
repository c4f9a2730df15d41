"""Characters as grey images: outlines from the fonts that matplotlib ships, drawn by exact area coverage.

Nothing here depends on a font rasteriser, on hinting or on a mathematics library. Outlines are the integers in the font
files, and every later step is an elementwise IEEE addition, multiplication or division (or a sum taken in order), so
the same fonts give the same bytes on every machine.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

# Computer Modern is left out because its files map code points to other characters, the STIX size variants and Display
# cuts because they hold only a few dozen characters.
TYPEFACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
)
CURVE_PIECES = 6  # straight pieces per quadratic curve: off the true curve by under 0.1 px at 32 px
LINE_PIECES = 4  # pieces per straight edge, so that it can be bent
BATCH = 512  # glyphs drawn at a time, to bound the memory


def font_file(typeface: str) -> Path:
    """The file of a typeface inside matplotlib."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{typeface}.ttf"


@cache
def fonts_digest() -> str:
    """A fingerprint of the font files: what is drawn depends on nothing else outside this package."""
    digest = hashlib.sha256()
    for typeface in TYPEFACES:
        digest.update(font_file(typeface).read_bytes())
    return digest.hexdigest()


@cache
def charmap(typeface: str) -> frozenset[int]:
    """The code points that a typeface really draws, as its own character map says."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(font_file(typeface))).get_charmap())


def read_outlines(typeface: str, codes: Sequence[int]) -> list[np.ndarray]:
    """Closed outlines of characters as straight edges.

    Returns:
        One (E, 4) float64 array a character: x0, y0, x1, y1 in font units, y up. Blank characters have E = 0.
    """
    from matplotlib.ft2font import FT2Font, LoadFlags

    font = FT2Font(str(font_file(typeface)))
    font.set_size(font.units_per_EM, 72)  # one font unit a pixel: coordinates arrive unscaled
    outlines = []
    for code in codes:
        font.load_char(code, flags=LoadFlags.NO_HINTING)
        outlines.append(_edges(*font.get_path()))
    return outlines


def _edges(vertices: np.ndarray, codes: np.ndarray) -> np.ndarray:
    line = np.flatnonzero(codes == 2)
    curve = np.flatnonzero(codes == 3)[::2]  # a curve is two entries: control point, end point
    start, control, end = (vertices[curve + k][:, None] for k in (-1, 0, 1))  # (curves, 1, 2)
    t = np.arange(CURVE_PIECES + 1)[:, None] / CURVE_PIECES
    curved = start * ((1 - t) * (1 - t)) + control * (2 * t * (1 - t)) + end * (t * t)  # (curves, pieces + 1, 2)
    t = np.arange(LINE_PIECES + 1)[:, None] / LINE_PIECES
    straight = vertices[line - 1][:, None] * (1 - t) + vertices[line][:, None] * t
    return np.concatenate(
        [np.concatenate([points[:, :-1], points[:, 1:]], axis=2).reshape(-1, 4) for points in (straight, curved)]
    )


def fit(edges: np.ndarray) -> tuple[float, float, float]:
    """Centre and longer side of an outline's bounding box: what scale and position are normalised by."""
    low = edges.reshape(-1, 2).min(axis=0)
    high = edges.reshape(-1, 2).max(axis=0)
    middle = (low + high) / 2
    return float(middle[0]), float(middle[1]), float((high - low).max())


def normalise(edges: np.ndarray) -> np.ndarray:
    """The outline centred at 0 with a longer side of 1, y down: capital and small c now differ only if their shapes do."""
    x, y, side = fit(edges)
    return (edges - np.array([x, y, x, y])) * np.array([1.0, -1.0, 1.0, -1.0]) / side


def draw(outlines: Sequence[np.ndarray], matrices: np.ndarray, size: int) -> np.ndarray:
    """Area coverage of outlines under affine maps.

    Args:
        outlines: G arrays (E, 4).
        matrices: (G, 2, 3), each maps (x, y, 1) of an outline to pixels.
        size: height and width of the images.

    Returns:
        (G, size, size) float64 in 0..1.

    Example:
        >>> square = np.array([[0, 0, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 0.0]])
        >>> draw([square], np.array([[[2, 0, 0.5], [0, 2, 1.0]]]), 3)[0].tolist()
        [[0.0, 0.0, 0.0], [0.5, 1.0, 0.5], [0.5, 1.0, 0.5]]
    """
    images = np.empty((len(outlines), size, size))
    for start in range(0, len(outlines), BATCH):
        part = slice(start, start + BATCH)
        images[part] = _draw_batch(outlines[part], matrices[part], size)
    return images


def _draw_batch(outlines: Sequence[np.ndarray], matrices: np.ndarray, size: int) -> np.ndarray:
    owner = np.repeat(np.arange(len(outlines)), [len(edges) for edges in outlines])
    edges = np.concatenate(outlines)
    (a, b, c), (d, e, f) = matrices.transpose(1, 2, 0)[..., owner]
    x0, y0, x1, y1 = edges.T
    x0, y0, x1, y1 = a * x0 + b * y0 + c, d * x0 + e * y0 + f, a * x1 + b * y1 + c, d * x1 + e * y1 + f

    # Cut every edge at the pixel rows, then at the pixel columns; a piece then lies in one pixel, covers its height
    # in all pixels to the right and a trapezium in its own. The running sum along a row is the winding coverage.
    y0, y1, x0, x1, owner = _cut(y0, y1, x0, x1, owner)
    inside = (np.minimum(y0, y1) >= 0) & (np.maximum(y0, y1) <= size)
    y0, y1, x0, x1, owner = (part[inside] for part in (y0, y1, x0, x1, owner))
    x0, x1 = np.clip(x0, 0, size), np.clip(x1, 0, size)
    x0, x1, y0, y1, owner = _cut(x0, x1, y0, y1, owner)
    row = np.minimum(np.floor((y0 + y1) / 2), size - 1)
    column = np.floor((x0 + x1) / 2)
    height = y1 - y0
    right = height * ((x0 + x1) / 2 - column)
    cell = ((owner * size + row) * (size + 2) + column).astype(np.int64)
    shape = (len(outlines), size, size + 2)
    cover = np.bincount(cell, height - right, np.prod(shape)) + np.bincount(cell + 1, right, np.prod(shape))
    return np.minimum(np.abs(np.cumsum(cover.reshape(shape), axis=2)[..., :size]), 1.0)


def _cut(u0: np.ndarray, u1: np.ndarray, v0: np.ndarray, v1: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, ...]:
    """Pieces of the edges (u, v) between whole values of u, with the owners of the pieces."""
    low, high = np.minimum(u0, u1), np.maximum(u0, u1)
    first = np.floor(low)
    pieces = np.maximum(np.ceil(high) - first, 1).astype(np.int64)
    of = np.repeat(np.arange(len(u0)), pieces)
    step = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + first[of]
    start, end = np.maximum(step, low[of]), np.minimum(step + 1, high[of])
    u0, u1, v0, v1 = u0[of], u1[of], v0[of], v1[of]
    start, end = np.where(u0 <= u1, start, end), np.where(u0 <= u1, end, start)
    flat = u0 == u1
    slope = (v1 - v0) / np.where(flat, 1.0, u1 - u0)
    # The ends of an edge are kept as they are, so that neighbouring edges still meet exactly.
    v_start = np.where(start == u0, v0, v0 + slope * (start - u0))
    v_end = np.where(flat | (end == u1), v1, v0 + slope * (end - u0))
    return start, end, v_start, v_end, owner[of]
