"""Glyphs, the built-in data set: characters of many scripts in up to 16 typefaces, one degraded view of each drawing.

Many classes, few images, fine differences, nothing to download. An image depends only on its character, its typeface and the
seed. It has the same bytes on every machine, since no font rasterizer, hinting or math library is involved: outlines are the
integers in the font files that matplotlib ships, and every later step is an elementwise IEEE addition, multiplication or
division, or a sum in a fixed order.

`glyph_classes.txt` lists the classes; `glyph_classes.py` chose them.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.samplers import GAMMA, scramble, signed
from xbm_app.files import MALFORMED, read_arrays

TABLE = Path(__file__).with_name("glyph_classes.txt")
KS = (1, 2, 4, 8)
# Without Computer Modern, whose files map code points to other characters, and without the STIX size variants and Display
# cuts, which have only a few dozen characters.
TYPEFACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
CURVE_PIECES = 6  # line segments per quadratic curve: less than 0.1 px from the curve at 32 px
LINE_PIECES = 4  # segments per straight edge, so that it can be bent
BATCH = 512  # glyphs drawn at once, to limit memory

# How hard a view is. Lengths are fractions of the image; gray levels are from 0 to 1.
SIDE = 0.75  # longer side of the glyph
SCALE = 0.12  # times 1 ± this
STRETCH = 0.12  # width times 1 ± this, height divided by it
TURN = 0.0875  # tangent of half the largest rotation: 10 degrees
SHEAR = 0.15
SHIFT = 0.05
BEND = 0.08  # largest displacement of a part of the glyph, as a fraction of the glyph
BEND_CELLS = 3  # cells per side between the points that are displaced at random
INK = (0.35, 0.80)  # contrast between glyph and background, dark on light or light on dark
BLOTCH = 0.20  # amplitude of the uneven background
BLOTCH_CELLS = 5  # its coarseness: cells per side
GRAIN = 0.08  # standard deviation of the pixel noise


def read_glyphs(size: int = 32, cache: Path | str | None = None, seed: int = 0) -> Dataset:
    """Reads the built-in data set from the cache, or renders it in a few seconds.

    Args:
        size: height and width of the images.
        cache: the cache folder (default: `$XBM_CACHE`, or `xbm` in the user's cache folder).
        seed: of the views and of the class-disjoint split into halves.

    Example:
        >>> data = read_glyphs()
        >>> data.train.pixels.shape[1:], data.train.num_classes, data.protocols[0].query.num_classes
        ((32, 32), 462, 461)
    """
    if not 16 <= size <= 256:
        raise InputError(f"the size of glyphs must be 16 to 256 pixels, got {size}")
    folder = cache_folder() if cache is None else Path(cache)
    file = folder / f"glyphs-{size}-{seed}-{recipe()[:16]}.npz"
    pixels = _load(file)
    if pixels is None:
        pixels = make_views(glyph_classes(), size, seed)
        _save(file, pixels)
    return split(pixels, seed)


@functools.cache
def glyph_classes() -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the classes: each a code point, and the positions in `TYPEFACES` of its typefaces."""
    rows = (line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    bits = range(len(TYPEFACES))
    return tuple((int(code, 16), tuple(k for k in bits if int(mask, 16) >> k & 1)) for code, mask, *_ in rows)


def split(pixels: np.ndarray, seed: int) -> Dataset:
    """Splits the classes at random into a training half and a test half."""
    classes = glyph_classes()
    labels = np.repeat(np.arange(len(classes)), [len(typefaces) for _, typefaces in classes])
    names = [f"U+{code:04X} {chr(code)}" for code, _ in classes]
    everything = ImageSet("glyphs", labels, names, pixels=pixels)
    order = np.argsort(random_bits(seed, np.arange(len(classes)), 1)[:, 0], kind="stable")
    in_train = np.zeros(len(classes), bool)
    in_train[order[: (len(classes) + 1) // 2]] = True
    train = everything.select(np.flatnonzero(in_train[labels]), "glyphs train")
    test = everything.select(np.flatnonzero(~in_train[labels]), "glyphs test")
    return Dataset("glyphs", train, (Protocol("test", test, KS),))


# ------------------------------------------------------------------------------------------------------------ the cache


def cache_folder() -> Path:
    """Returns the folder for files that can be regenerated: `$XBM_CACHE`, or `xbm` in the user's cache folder."""
    if own := os.environ.get("XBM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xbm"


@functools.cache
def recipe() -> str:
    """Returns a digest of everything that the images depend on, so that a cache of another version is not used."""
    digest = hashlib.sha256()
    for file in (*map(font_file, TYPEFACES), Path(__file__), TABLE):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(file: Path) -> np.ndarray | None:
    """Reads what `_save` wrote; None if the file is missing, truncated or altered."""
    try:
        return read_arrays(file)["pixels"]
    except (OSError, *MALFORMED):
        return None


def _save(file: Path, pixels: np.ndarray) -> None:
    """Writes beside the target and renames, so that the target is never a partial file. A failed write is no error."""
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as stream:
            temporary = stream.name
            np.savez(stream, pixels=pixels)
        os.replace(temporary, file)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ the views


def make_views(classes: Sequence[tuple[int, tuple[int, ...]]], size: int, seed: int) -> np.ndarray:
    """Renders one view of every drawing of `classes`, class by class.  # (N, size, size) uint8"""
    drawings = [(code, typeface) for code, typefaces in classes for typeface in typefaces]
    outlines = read_drawings(drawings)
    views = np.empty((len(drawings), size, size), np.uint8)
    for start in range(0, len(drawings), BATCH):
        batch = slice(start, start + BATCH)
        views[batch] = _views(drawings[batch], outlines[batch], size, seed)
    return views


def _views(drawings: list[tuple[int, int]], outlines: list[np.ndarray], size: int, seed: int) -> np.ndarray:
    keys = np.array([code * 64 + typeface for code, typeface in drawings])
    points = 2 * (BEND_CELLS + 1) ** 2
    bits = random_bits(seed, keys, points + 8 + 8 + (BLOTCH_CELLS + 1) ** 2 + size * size)
    bent = [bend(edges, moves) for edges, moves in zip(outlines, uniform(bits[:, :points]))]
    coverage = draw(bent, view_matrices(bits[:, points : points + 8], size), size)
    return degrade(coverage, bits[:, points + 8 :])


def random_bits(seed: int, keys: np.ndarray, count: int) -> np.ndarray:
    """Returns a stream of random words for each key (splitmix64), independent of numpy's version.  # (len(keys), count)"""
    start = scramble(scramble(np.array([signed(seed)])) + (keys - 1) * GAMMA)
    return scramble(start[:, None] + np.arange(count) * GAMMA).view(np.uint64)


def uniform(bits: np.ndarray, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """Converts random words to numbers from `low` to `high`."""
    return low + (high - low) * ((bits >> np.uint64(11)).astype(np.float64) / 2**53)


def bend(edges: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Displaces the parts of a normalized outline (E, 4) smoothly; `moves` are 2 · (BEND_CELLS + 1)² in -1..1."""
    grid = BEND * moves.reshape(BEND_CELLS + 1, BEND_CELLS + 1, 2)
    points = edges.reshape(-1, 2)
    position = (points + 0.5) * BEND_CELLS
    cell = np.clip(np.floor(position), 0, BEND_CELLS - 1).astype(np.int64)
    x, y = cell.T
    u, v = (position - cell)[:, :1], (position - cell)[:, 1:]
    top = grid[y, x] * (1 - u) + grid[y, x + 1] * u
    bottom = grid[y + 1, x] * (1 - u) + grid[y + 1, x + 1] * u
    return (points + top * (1 - v) + bottom * v).reshape(-1, 4)


def view_matrices(bits: np.ndarray, size: int) -> np.ndarray:
    """Returns rotation × shear × stretch × scale, and a shift, from `bits` (G, 8).  # (G, 2, 3)"""
    u = uniform(bits).T
    half = TURN * u[0]
    cos, sin = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
    shear, stretch = SHEAR * u[1], 1 + STRETCH * u[2]
    scale = SIDE * size * (1 + SCALE * u[3])
    wide, high = scale * stretch, scale / stretch
    x, y = size / 2 + SHIFT * size * u[4], size / 2 + SHIFT * size * u[5]
    rows = [[cos * wide, (cos * shear - sin) * high, x], [sin * wide, (sin * shear + cos) * high, y]]
    return np.array(rows).transpose(2, 0, 1)


def degrade(coverage: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Renders coverage (G, H, H) as uint8 on an uneven, grainy background. `bits` is (G, 8 + cells + H²)."""
    count, size, _ = coverage.shape
    corners = (BLOTCH_CELLS + 1) ** 2
    ink = uniform(bits[:, 0], *INK) * np.where(bits[:, 1] >> np.uint64(63), 1.0, -1.0)
    # The sum of four bytes is nearly normal and needs no logarithm, which differs between machines.
    noise = bits[:, 8 + corners :].reshape(count, size, size)
    total = sum((noise >> np.uint64(8 * k)) & np.uint64(255) for k in range(4))
    grain = (np.asarray(total, np.float64) - 510) / 147.8
    background = _blotches(uniform(bits[:, 8 : 8 + corners]), size)
    image = 0.5 + ink[:, None, None] * (coverage - 0.5) + BLOTCH * background + GRAIN * grain
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def _blotches(values: np.ndarray, size: int) -> np.ndarray:
    """Interpolates random `values` (G, corners) on a coarse grid, along each axis in turn.  # (G, size, size)"""
    grid = values.reshape(len(values), BLOTCH_CELLS + 1, BLOTCH_CELLS + 1)
    position = (np.arange(size) + 0.5) / size * BLOTCH_CELLS
    cell = np.floor(position).astype(np.int64)
    part = position - cell
    rows = grid[:, cell] * (1 - part)[:, None] + grid[:, cell + 1] * part[:, None]
    return rows[:, :, cell] * (1 - part) + rows[:, :, cell + 1] * part


# ---------------------------------------------------------------------------------------------------------- the drawings


def font_file(typeface: str) -> Path:
    """Returns the file of a typeface inside matplotlib."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{typeface}.ttf"


def read_drawings(drawings: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Reads the normalized outline of each (code point, position in `TYPEFACES`)."""
    outlines: dict[tuple[int, int], np.ndarray] = {}
    for position, typeface in enumerate(TYPEFACES):
        codes = [code for code, k in drawings if k == position]
        outlines |= {(code, position): normalise(edges) for code, edges in zip(codes, read_outlines(typeface, codes))}
    return [outlines[drawing] for drawing in drawings]


def read_outlines(typeface: str, codes: Sequence[int]) -> list[np.ndarray]:
    """Reads closed outlines of characters as straight edges.

    Returns:
        One (E, 4) float64 array per character: x0, y0, x1, y1 in font units, y up. Blank characters have E = 0.
    """
    from matplotlib.ft2font import FT2Font, LoadFlags

    font = FT2Font(str(font_file(typeface)))
    font.set_size(font.units_per_EM, 72)  # one pixel per font unit: coordinates are not scaled
    outlines = []
    for code in codes:
        font.load_char(code, flags=LoadFlags.NO_HINTING)
        outlines.append(_edges(*font.get_path()))
    return outlines


def _edges(vertices: np.ndarray, codes: np.ndarray) -> np.ndarray:
    line = np.flatnonzero(codes == 2)
    curve = np.flatnonzero(codes == 3)[::2]  # a curve has two entries: control point, end point
    start, control, end = (vertices[curve + k][:, None] for k in (-1, 0, 1))  # (curves, 1, 2)
    t = np.arange(CURVE_PIECES + 1)[:, None] / CURVE_PIECES
    curved = start * ((1 - t) * (1 - t)) + control * (2 * t * (1 - t)) + end * (t * t)  # (curves, pieces + 1, 2)
    t = np.arange(LINE_PIECES + 1)[:, None] / LINE_PIECES
    straight = vertices[line - 1][:, None] * (1 - t) + vertices[line][:, None] * t
    return np.concatenate(
        [np.concatenate([points[:, :-1], points[:, 1:]], axis=2).reshape(-1, 4) for points in (straight, curved)]
    )


def normalise(edges: np.ndarray) -> np.ndarray:
    """Centers an outline at 0 with a longer side of 1, y down, so that C and c differ only if their shapes do."""
    points = edges.reshape(-1, 2)
    low, high = points.min(axis=0), points.max(axis=0)
    return (edges - np.tile((low + high) / 2, 2)) * np.array([1.0, -1.0, 1.0, -1.0]) / (high - low).max()


def draw(outlines: Sequence[np.ndarray], matrices: np.ndarray, size: int) -> np.ndarray:
    """Computes the area coverage of outlines under affine maps.

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
        batch = slice(start, start + BATCH)
        images[batch] = _draw_batch(outlines[batch], matrices[batch], size)
    return images


def _draw_batch(outlines: Sequence[np.ndarray], matrices: np.ndarray, size: int) -> np.ndarray:
    owner = np.repeat(np.arange(len(outlines)), [len(edges) for edges in outlines])
    edges = np.concatenate(outlines)
    (a, b, c), (d, e, f) = matrices.transpose(1, 2, 0)[..., owner]
    x0, y0, x1, y1 = edges.T
    x0, y0, x1, y1 = a * x0 + b * y0 + c, d * x0 + e * y0 + f, a * x1 + b * y1 + c, d * x1 + e * y1 + f

    # Each edge is cut at the pixel rows, then at the pixel columns. A piece then lies in one pixel: it covers its height in
    # all pixels to the right and a trapezoid in its own. The cumulative sum along a row is the winding coverage.
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
    """Cuts the edges (u, v) at whole values of u, and returns the pieces with their owners."""
    low, high = np.minimum(u0, u1), np.maximum(u0, u1)
    first = np.floor(low)
    pieces = np.maximum(np.ceil(high) - first, 1).astype(np.int64)
    edge = np.repeat(np.arange(len(u0)), pieces)  # of each piece
    step = np.arange(len(edge)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + first[edge]
    start, end = np.maximum(step, low[edge]), np.minimum(step + 1, high[edge])
    u0, u1, v0, v1 = u0[edge], u1[edge], v0[edge], v1[edge]
    start, end = np.where(u0 <= u1, start, end), np.where(u0 <= u1, end, start)
    flat = u0 == u1
    slope = (v1 - v0) / np.where(flat, 1.0, u1 - u0)
    # The ends of an edge stay exactly as they are, so that neighboring edges still meet.
    v_start = np.where(start == u0, v0, v0 + slope * (start - u0))
    v_end = np.where(flat | (end == u1), v1, v0 + slope * (end - u0))
    return start, end, v_start, v_end, owner[edge]
