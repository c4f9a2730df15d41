"""The glyph classes that come closest to each other, side by side: whether a person can tell them apart is to be seen."""

import numpy as np
from PIL import Image

from xbm_app.data.glyph_classes import CANVAS, TURNS, glyph_classes, ink_and_far, turned, unmatched
from xbm_app.data.glyph_render import TYPEFACES, draw, normalise, read_outlines
from xbm_app.data.images import Dataset, ImageSet
from xbm_app.data.sheet import contact_sheet

SHOWN = 3  # drawings of each class in a pair
PAIRS_PER_ROW = 4
ZOOM = 2
ROWS = 1024  # drawings compared with all others at a time


def near_neighbours_sheet(dataset: Dataset, pairs: int = 60) -> Image.Image:
    """The closest pairs of classes of the glyphs data set, training and test classes together.

    Half of the pairs are the closest by unmatched ink, which the classes were chosen by, half by correlation of blurred
    drawings. Each pair is two rows of images: clean drawings of both classes in turn, and below them their views in the
    data set; the first two are the closest drawings.
    """
    sets = [dataset.train, *(protocol.query for protocol in dataset.protocols)]
    views, code, typeface = (np.concatenate(parts) for parts in zip(*(_drawings(images) for images in sets)))
    outlines: list[np.ndarray] = [np.empty(0)] * len(code)
    for t, name in enumerate(TYPEFACES):
        of = np.flatnonzero(typeface == t)
        for k, edges in zip(of, read_outlines(name, code[of].tolist())):
            outlines[k] = normalise(edges)
    images = turned(outlines, TURNS[0])
    by_ink, by_picture = closest_pairs(images, code, pairs)
    size = views.shape[1]
    matrix = np.array([[0.75 * size, 0, size / 2], [0, 0.75 * size, size / 2]])
    cells = []
    for first, second in by_ink[: pairs - pairs // 2] + [p for p in by_picture if p not in by_ink][: pairs // 2]:
        shown = _shown(first, second, code, typeface)
        clean = draw([outlines[k] for k in shown], np.broadcast_to(matrix, (len(shown), 2, 3)), size)
        cells.append([(255 - np.rint(255 * clean)).astype(np.uint8), views[shown]])
    blank = np.full_like(cells[0][0], 128)
    cells += [[blank, blank]] * (-len(cells) % PAIRS_PER_ROW)
    rows = [
        image
        for start in range(0, len(cells), PAIRS_PER_ROW)
        for line in (0, 1)
        for cell in cells[start : start + PAIRS_PER_ROW]
        for image in cell[line]
    ]
    sheet = contact_sheet(rows, columns=PAIRS_PER_ROW * 2 * SHOWN)
    return sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST)


def closest_pairs(images: np.ndarray, code: np.ndarray, count: int) -> tuple[list[tuple[int, int]], ...]:
    """Positions of the closest drawings of the `count` closest pairs of classes: by unmatched ink, by correlation."""
    ink, far = ink_and_far(images)
    half = CANVAS // 2
    blurred = images.reshape(-1, half, 2, half, 2).mean(axis=(2, 4), dtype=np.float32).reshape(len(images), -1)
    blurred -= blurred.mean(axis=1, keepdims=True)
    blurred /= np.linalg.norm(blurred, axis=1, keepdims=True)
    mass = ink.sum(axis=1)
    found: tuple[dict, dict] = ({}, {})
    for start in range(0, len(images), ROWS):
        rows = slice(start, start + ROWS)
        lighter = np.minimum(mass[rows, None], mass[None])
        measures = (unmatched(ink[rows], far[rows], ink, far) / np.sqrt(lighter), -(blurred[rows] @ blurred.T))
        for measure, best in zip(measures, found):
            measure[code[rows, None] >= code[None]] = np.inf
            nearest = np.argpartition(measure, min(8, len(code) - 1), axis=1)[:, :8]
            for i, j in ((i, j) for i, of in enumerate(nearest) for j in of if np.isfinite(measure[i, j])):
                pair, entry = (code[start + i], code[j]), (float(measure[i, j]), start + i, int(j))
                best[pair] = min(best.get(pair, entry), entry)
    return tuple([(i, j) for _, i, j in sorted(best.values())[:count]] for best in found)


def _drawings(images: ImageSet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views, code points and typefaces of a set of glyphs, whose images lie class by class, typeface by typeface."""
    typefaces = dict(glyph_classes())
    codes = [int(name.split()[0].removeprefix("U+"), 16) for name in images.class_names]
    code = np.array(codes)[images.labels]
    assert images.pixels is not None
    return images.pixels, code, np.concatenate([typefaces[c] for c in codes])


def _shown(first: int, second: int, code: np.ndarray, typeface: np.ndarray) -> list[int]:
    """The closest drawings, then drawings of both classes in other typefaces, as far apart in the list as can be."""
    ours, theirs = (np.flatnonzero(code == code[k]) for k in (first, second))
    both = np.intersect1d(typeface[ours], typeface[theirs])
    pairs = [(first, second)]
    for part in range(1, SHOWN):
        t = both[len(both) * part // SHOWN] if len(both) else None
        mine = ours[typeface[ours] == t] if t is not None else ours[part : part + 1]
        other = theirs[typeface[theirs] == t] if t is not None else theirs[part : part + 1]
        pairs.append((int(mine[0]), int(other[0])))
    return [k for pair in pairs for k in pair]
