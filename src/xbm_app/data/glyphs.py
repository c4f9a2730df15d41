"""Glyphs, the built-in data set: characters of many scripts in up to 16 typefaces, each image a hard view of one drawing.

Many classes, few images, fine differences, nothing to download. An image depends on its character, its typeface and the
seed alone; `glyph_render` says why it is the same on every machine.
"""

import functools
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data import glyph_render
from xbm_app.data.glyph_classes import TABLE, glyph_classes
from xbm_app.data.glyph_render import BATCH, TYPEFACES, draw, fonts_digest, normalise, read_outlines
from xbm_app.data.images import Dataset, ImageSet, Protocol

KS = (1, 2, 4, 8)

# How hard a view is. Widths are fractions of the image, grey levels run from 0 to 1.
SIDE = 0.75  # longer side of the glyph
SCALE = 0.12  # times 1 ± this
STRETCH = 0.12  # width times 1 ± this, height divided by it
TURN = 0.0875  # tangent of half the largest rotation: 10 degrees
SHEAR = 0.15
SHIFT = 0.05
BEND = 0.08  # of the glyph: how far its parts are moved, smoothly
BEND_CELLS = 3  # cells along each side between the points that are moved at random
INK = (0.35, 0.80)  # difference between glyph and ground, dark on light or light on dark
BLOTCH = 0.20  # amplitude of the uneven ground
BLOTCH_CELLS = 5  # its coarseness: cells along each side
GRAIN = 0.08  # standard deviation of the pixel noise


def read_glyphs(size: int = 32, cache: Path | str | None = None, seed: int = 0) -> Dataset:
    """The built-in data set, from the cache or made in a few seconds.

    Args:
        size: height and width of the images.
        cache: folder to keep it in; by default `$XBM_CACHE`, else `xbm` in the user's cache folder.
        seed: of the views and of the class-disjoint split into halves.

    Example:
        >>> data = read_glyphs()
        >>> data.train.pixels.shape[1:], data.train.num_classes, data.protocols[0].query.num_classes
        ((32, 32), 462, 461)
    """
    if not 16 <= size <= 256:
        raise InputError(f"glyphs of {size} pixels cannot be made: choose a size from 16 to 256")
    folder = cache_folder() if cache is None else Path(cache)
    file = folder / f"glyphs-{size}-{seed}-{recipe()[:16]}.npz"
    pixels = _load(file)
    if pixels is None:
        pixels = make_views(glyph_classes(), size, seed)
        _save(file, pixels)
    return split(pixels, seed)


def cache_folder() -> Path:
    """Where things that can be made again are kept: `$XBM_CACHE`, else `xbm` in the user's cache folder."""
    if own := os.environ.get("XBM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xbm"


@functools.cache
def recipe() -> str:
    """A fingerprint of all that the images depend on, the fonts included: a cache made by another one is not used."""
    digest = hashlib.sha256(fonts_digest().encode())
    for file in (Path(__file__), Path(glyph_render.__file__), TABLE):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(file: Path) -> np.ndarray | None:
    """What `_save` wrote, or None if the file is missing, cut short or altered."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            pixels: np.ndarray = arrays["pixels"]  # the archive's own checksum finds altered bytes
            return pixels
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def _save(file: Path, pixels: np.ndarray) -> None:
    """Writes beside the target and renames, so that no one ever sees half a file; a folder without room is no error."""
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


def split(pixels: np.ndarray, seed: int) -> Dataset:
    """Half of the classes for training, the other half for testing."""
    classes = glyph_classes()
    labels = np.repeat(np.arange(len(classes)), [len(typefaces) for _, typefaces in classes])
    names = [f"U+{code:04X} {chr(code)}" for code, _ in classes]
    everything = ImageSet("glyphs", labels, names, pixels=pixels)
    turn = np.argsort(random_bits(seed, np.arange(len(classes)), 1)[:, 0], kind="stable")
    in_train = np.zeros(len(classes), bool)
    in_train[turn[: (len(classes) + 1) // 2]] = True
    train = everything.select(np.flatnonzero(in_train[labels]), "glyphs train")
    test = everything.select(np.flatnonzero(~in_train[labels]), "glyphs test")
    return Dataset("glyphs", train, (Protocol("test", test, KS),))


def make_views(classes: Sequence[tuple[int, tuple[int, ...]]], size: int, seed: int) -> np.ndarray:
    """(N, size, size) uint8: one view of every drawing of `classes`, class by class."""
    drawings = [(code, typeface) for code, typefaces in classes for typeface in typefaces]
    outlines: dict[tuple[int, int], np.ndarray] = {}
    for typeface, name in enumerate(TYPEFACES):
        codes = [code for code, typefaces in classes if typeface in typefaces]
        for code, edges in zip(codes, read_outlines(name, codes)):
            outlines[code, typeface] = normalise(edges)
    views = np.empty((len(drawings), size, size), np.uint8)
    for start in range(0, len(drawings), BATCH):
        batch = drawings[start : start + BATCH]
        views[start : start + BATCH] = _views(batch, [outlines[drawing] for drawing in batch], size, seed)
    return views


def _views(drawings: list[tuple[int, int]], outlines: list[np.ndarray], size: int, seed: int) -> np.ndarray:
    keys = np.array([code * 64 + typeface for code, typeface in drawings])
    points = 2 * (BEND_CELLS + 1) ** 2
    bits = random_bits(seed, keys, points + 8 + 8 + (BLOTCH_CELLS + 1) ** 2 + size * size)
    bent = [bend(edges, moves) for edges, moves in zip(outlines, uniform(bits[:, :points]))]
    coverage = draw(bent, view_matrices(bits[:, points : points + 8], size), size)
    return degrade(coverage, bits[:, points + 8 :])


def random_bits(seed: int, keys: np.ndarray, count: int) -> np.ndarray:
    """(len(keys), count) uint64: a stream of random bits for each key (splitmix64), the same with every numpy."""
    step = np.uint64(0x9E3779B97F4A7C15)

    def mixed(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))

    start = mixed(mixed(np.array([seed % 2**64], np.uint64) + step) + keys.astype(np.uint64) * step)
    return mixed(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * step)


def uniform(bits: np.ndarray, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """Numbers from `low` to `high`."""
    return low + (high - low) * ((bits >> np.uint64(11)).astype(np.float64) / 2**53)


def bend(edges: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """The normalised outline (E, 4) with its parts moved smoothly; `moves` are 2 · (BEND_CELLS + 1)² in -1..1."""
    grid = BEND * moves.reshape(BEND_CELLS + 1, BEND_CELLS + 1, 2)
    points = edges.reshape(-1, 2)
    at = (points + 0.5) * BEND_CELLS
    cell = np.clip(np.floor(at), 0, BEND_CELLS - 1).astype(np.int64)
    x, y = cell.T
    u, v = (at - cell)[:, :1], (at - cell)[:, 1:]
    top = grid[y, x] * (1 - u) + grid[y, x + 1] * u
    bottom = grid[y + 1, x] * (1 - u) + grid[y + 1, x + 1] * u
    return (points + top * (1 - v) + bottom * v).reshape(-1, 4)


def view_matrices(bits: np.ndarray, size: int) -> np.ndarray:
    """(G, 2, 3): rotation × shear × stretch × scale of a normalised outline, then a shift. `bits` is (G, 8)."""
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
    """Coverage (G, H, H) as uint8 pictures on an uneven, grainy ground. `bits` is (G, 8 + cells + H²)."""
    count, size, _ = coverage.shape
    corners = (BLOTCH_CELLS + 1) ** 2
    ink = uniform(bits[:, 0], *INK) * np.where(bits[:, 1] >> np.uint64(63), 1.0, -1.0)
    # A sum of four bytes is nearly normal and needs no logarithm, which differs between machines.
    noise = bits[:, 8 + corners :].reshape(count, size, size)
    total = sum((noise >> np.uint64(8 * k)) & np.uint64(255) for k in range(4))
    grain = (np.asarray(total, np.float64) - 510) / 147.8
    ground = blotches(uniform(bits[:, 8 : 8 + corners]), size)
    image = 0.5 + ink[:, None, None] * (coverage - 0.5) + BLOTCH * ground + GRAIN * grain
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def blotches(values: np.ndarray, size: int) -> np.ndarray:
    """(G, size, size) smooth pictures between random `values` (G, corners) on a coarse grid, along each axis in turn."""
    grid = values.reshape(len(values), BLOTCH_CELLS + 1, BLOTCH_CELLS + 1)
    at = (np.arange(size) + 0.5) / size * BLOTCH_CELLS
    cell = np.floor(at).astype(np.int64)
    part = at - cell
    rows = grid[:, cell] * (1 - part)[:, None] + grid[:, cell + 1] * part[:, None]
    return rows[:, :, cell] * (1 - part) + rows[:, :, cell + 1] * part
