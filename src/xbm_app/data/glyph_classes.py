"""How the classes of the glyphs data set were chosen, so that no class looks like another, and a sheet to see that.

A character and its look-alike in two classes would be a false negative in every batch, and a memory multiplies it. So the
characters are considered one after another, and one whose drawings are too similar to those of an earlier one is left out. This
takes minutes, so the result is stored in `glyph_classes.txt`; `python -m xbm_app.data.glyph_classes` writes that file again.
"""

import unicodedata
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from xbm_app.data.glyphs import TABLE, TYPEFACES, draw, font_file, glyph_classes, normalise, read_drawings, read_outlines
from xbm_app.data.images import Dataset, ImageSet
from xbm_app.progress import track

MIN_DRAWINGS = 6  # different drawings per class, at least
CANVAS, SIDE = 28, 24  # pixels: glyphs are compared at the size they have in a 32-pixel view
LEVELS = 15  # of gray: few enough that sums of products are exact in float32, in any order
TOLERANCE = 1  # pixels: ink this close to ink of the other drawing is matched
MIN_UNMATCHED = 6.3  # pixels of ink: drawings with less unmatched ink on either side are look-alikes ...
MIN_UNMATCHED_BOLD = 0.48  # ... and so are those with less than this × √ink, since bold strokes differ in more pixels
MAX_ALIKE = 0.25  # a character is left out if more than this fraction of its drawings are look-alikes
BLOCK = 48  # characters measured at once
SHOWN = 3  # drawings per class in a pair of the sheet
PAIRS_PER_ROW = 4
FRAME = 2  # pixels of gray around each drawing of the sheet
GRAY = 128
ZOOM = 2
ROWS = 1024  # drawings compared with all others at once
# Views rotate, shear and stretch a glyph, so the closest of these counts: (radians, shear, width by height).
TURNS = ((0, 0, 1.0), (-0.2, 0, 1.0), (0.2, 0, 1.0), (0, -0.2, 1.0), (0, 0.2, 1.0), (0, 0, 0.85), (0, 0, 1 / 0.85))
# Box drawing, blocks and Braille are patterns on a grid: they mean nothing without scale and position.
GRIDS = (range(0x2500, 0x25A0), range(0x2800, 0x2900))


@dataclass(frozen=True)
class Drawings:
    """The different drawings of one character: positions in `TYPEFACES`, and normalized outlines."""

    code: int
    typefaces: tuple[int, ...]
    outlines: list[np.ndarray]


@cache
def charmap(typeface: str) -> frozenset[int]:
    """Returns the code points that a typeface draws, according to its own character map."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(font_file(typeface))).get_charmap())


def is_candidate(code: int) -> bool:
    """Returns whether a code point is a visible character and not a variant of another.

    Excluded are spaces, marks, controls and private use, compatibility forms of a single character (² is a 2), fractions, and
    letters with two marks, whose parts are only a few pixels large.
    """
    character = chr(code)
    plain = unicodedata.normalize("NFKC", character)
    return (
        unicodedata.category(character)[0] in "LNPS"
        and (plain == character or (len(plain) > 1 and unicodedata.category(character) != "No"))
        and len(unicodedata.normalize("NFD", character)) <= 2
        and not any(code in grid for grid in GRIDS)
    )


def candidates(among: Container[int] = range(0x110000)) -> list[Drawings]:
    """Returns the characters with enough drawings: letters before letters with a mark, those in most typefaces first."""
    shapes: dict[int, dict[bytes, tuple[int, np.ndarray]]] = {}
    for position, typeface in enumerate(TYPEFACES):
        codes = sorted(code for code in charmap(typeface) if code in among and is_candidate(code))
        drawn = [(c, normalise(edges)) for c, edges in zip(codes, read_outlines(typeface, codes)) if len(edges)]
        for (code, outline), image in zip(drawn, turned([outline for _, outline in drawn], TURNS[0])):
            # A typeface that repeats another's drawing (an arrow, upright and oblique) is skipped.
            shapes.setdefault(code, {}).setdefault(image.tobytes(), (position, outline))
    drawings = [
        Drawings(code, tuple(k for k, _ in drawn.values()), [outline for _, outline in drawn.values()])
        for code, drawn in shapes.items()
        if len(drawn) >= MIN_DRAWINGS
    ]
    return sorted(drawings, key=lambda d: (len(unicodedata.normalize("NFD", chr(d.code))), -len(d.typefaces), d.code))


def turned(outlines: Sequence[np.ndarray], turn: tuple[float, float, float]) -> np.ndarray:
    """Draws outlines rotated, sheared and stretched.  # (G, CANVAS, CANVAS) uint8 in 0..LEVELS"""
    angle, shear, stretch = turn
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = matrix @ np.array([[1, shear], [0, 1]]) @ np.diag([stretch**0.5, stretch**-0.5]) * SIDE
    matrix = np.concatenate([matrix, np.full((2, 1), CANVAS / 2)], axis=1)
    images = draw(outlines, np.broadcast_to(matrix, (len(outlines), 2, 3)), CANVAS)
    return np.rint(images * LEVELS).astype(np.uint8)


def ink_and_far(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ink of drawings, and where no ink is near: two (G, CANVAS²) float32 arrays in 0..LEVELS."""
    near = np.pad(images, ((0, 0), (TOLERANCE, TOLERANCE), (TOLERANCE, TOLERANCE)))
    for axis in (1, 2):
        parts = [np.take(near, range(k, k + CANVAS), axis) for k in range(2 * TOLERANCE + 1)]
        near = np.maximum.reduce(parts)
    flat = (len(images), CANVAS * CANVAS)
    return images.reshape(flat).astype(np.float32), (LEVELS - near).reshape(flat).astype(np.float32)


def unmatched(ink: np.ndarray, far: np.ndarray, other_ink: np.ndarray, other_far: np.ndarray) -> np.ndarray:
    """Returns the pixels of ink without ink near them in the other drawing, the larger of both sides.  # (G, H)"""
    return np.maximum(ink @ other_far.T, far @ other_ink.T) / np.float32(LEVELS * LEVELS)


def alike(distance: np.ndarray, ink: np.ndarray, other_ink: np.ndarray) -> np.ndarray:
    """Returns which drawings, with `distance` pixels unmatched, a person could confuse.  # (G, H) bool"""
    mass = np.minimum(ink.sum(axis=1)[:, None], other_ink.sum(axis=1)[None]) / np.float32(LEVELS)
    return distance < np.maximum(np.float32(MIN_UNMATCHED), np.float32(MIN_UNMATCHED_BOLD) * np.sqrt(mass))


def _clashes(images: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    """Returns which drawings are look-alikes at the closest turn of either side.  # (G, H) bool"""
    ink, far = ink_and_far(images[0])
    other_ink, other_far = ink_and_far(others[0])
    distance = np.full((len(ink), len(other_ink)), np.inf, np.float32)
    for mine, theirs in zip(images, others):
        np.minimum(distance, unmatched(*ink_and_far(mine), other_ink, other_far), out=distance)
        np.minimum(distance, unmatched(ink, far, *ink_and_far(theirs)), out=distance)
    return alike(distance, ink, other_ink)


def choose_classes(characters: Sequence[Drawings], quiet: bool = False) -> list[tuple[int, tuple[int, ...]]]:
    """Chooses the characters, in order, that do not look like an earlier one, with the drawings that do not."""
    chosen = []
    kept_images = [np.empty((0, CANVAS, CANVAS), np.uint8)] * len(TURNS)  # the drawings of the chosen classes, at every turn
    kept_code = np.empty(0, np.int64)
    stands_for: dict[int, int] = {}  # a look-alike and the class that stands for it
    spelled: dict[tuple[int, str], int] = {}  # (letter, marks) and the class that has them
    for start in track(range(0, len(characters), BLOCK), "measuring look-alikes", quiet=quiet):
        block = characters[start : start + BLOCK]
        outlines = [outline for drawings in block for outline in drawings.outlines]
        code = np.repeat([d.code for d in block], [len(d.outlines) for d in block])
        images = [turned(outlines, turn) for turn in TURNS]
        clash = np.concatenate([_clashes(images, kept_images), _clashes(images, images)], axis=1)
        before = len(kept_code)
        other = np.concatenate([kept_code, code])
        taken: np.ndarray = np.arange(len(other)) < before
        for drawings in block:
            rows = np.flatnonzero(code == drawings.code)
            hits = clash[rows] & taken
            bad = hits.any(axis=1)
            spelt = unicodedata.normalize("NFD", chr(drawings.code))
            letter, marks = ord(spelt[0]), spelt[1:]
            # Ć and ć differ in the height of the mark: if c is a look-alike of C, so is ć of Ć.
            spelling = (stands_for.get(letter, letter), marks)
            if bad.sum() > MAX_ALIKE * len(rows) or (~bad).sum() < MIN_DRAWINGS:
                nearest = Counter(other[np.nonzero(hits)[1]].tolist()).most_common(1)[0][0]
                stands_for[drawings.code] = nearest
            elif marks and spelling in spelled:
                stands_for[drawings.code] = spelled[spelling]
            else:
                spelled[spelling] = drawings.code
                good = rows[~bad]
                taken[before + good] = True
                kept_images = [np.concatenate([kept, turn[good]]) for kept, turn in zip(kept_images, images)]
                kept_code = np.append(kept_code, code[good])
                chosen.append((drawings.code, tuple(t for t, out in zip(drawings.typefaces, bad) if not out)))
    return sorted(chosen)


def table(chosen: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """Formats the content of `glyph_classes.txt`."""
    rows = [f"{code:04X} {sum(1 << k for k in typefaces):04X} {chr(code)}" for code, typefaces in chosen]
    head = "# code point, typefaces (bit k: TYPEFACES[k]), character; made by python -m xbm_app.data.glyph_classes"
    return "\n".join([head, *rows, ""])


def near_neighbours_sheet(dataset: Dataset, pairs: int = 60) -> Image.Image:
    """Draws the most similar pairs of classes of the glyphs data set, training and test classes together.

    Half of the pairs are the closest by unmatched ink, the criterion that the classes were chosen by; the other half by
    correlation of blurred drawings. Each pair has two rows: clean drawings of both classes in turn, and their views in the data
    set below. The first two are the closest drawings.
    """
    sets = [dataset.train, *(protocol.query for protocol in dataset.protocols)]
    views, code, typeface = (np.concatenate(parts) for parts in zip(*(_drawings(images) for images in sets)))
    outlines = read_drawings(list(zip(code.tolist(), typeface.tolist())))
    images = turned(outlines, TURNS[0])
    by_ink, by_picture = closest_pairs(images, code, pairs)
    size = views.shape[1]
    matrix = np.array([[0.75 * size, 0, size / 2], [0, 0.75 * size, size / 2]])
    cells = []
    for first, second in by_ink[: pairs - pairs // 2] + [p for p in by_picture if p not in by_ink][: pairs // 2]:
        shown = _shown(first, second, code, typeface)
        clean = draw([outlines[k] for k in shown], np.broadcast_to(matrix, (len(shown), 2, 3)), size)
        cells.append([(255 - np.rint(255 * clean)).astype(np.uint8), views[shown]])
    blank = np.full_like(cells[0][0], GRAY)
    cells += [[blank, blank]] * (-len(cells) % PAIRS_PER_ROW)
    rows = [
        [np.pad(image, FRAME, constant_values=GRAY) for cell in cells[start : start + PAIRS_PER_ROW] for image in cell[line]]
        for start in range(0, len(cells), PAIRS_PER_ROW)
        for line in (0, 1)
    ]
    sheet = Image.fromarray(np.block(rows)).convert("RGB")
    return sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST)


def closest_pairs(images: np.ndarray, code: np.ndarray, count: int) -> tuple[list[tuple[int, int]], ...]:
    """Returns the closest drawings of the `count` closest pairs of classes, by unmatched ink and by correlation."""
    ink, far = ink_and_far(images)
    half = CANVAS // 2
    blurred = images.reshape(-1, half, 2, half, 2).mean(axis=(2, 4), dtype=np.float32).reshape(len(images), -1)
    blurred -= blurred.mean(axis=1, keepdims=True)
    blurred /= np.linalg.norm(blurred, axis=1, keepdims=True)
    mass = ink.sum(axis=1)
    closest: tuple[dict, dict] = ({}, {})
    for start in range(0, len(images), ROWS):
        rows = slice(start, start + ROWS)
        lighter = np.minimum(mass[rows, None], mass[None])
        measures = (unmatched(ink[rows], far[rows], ink, far) / np.sqrt(lighter), -(blurred[rows] @ blurred.T))
        for measure, best in zip(measures, closest):
            measure[code[rows, None] >= code[None]] = np.inf
            nearest = np.argpartition(measure, min(8, len(code) - 1), axis=1)[:, :8]
            for i, j in ((i, j) for i, row in enumerate(nearest) for j in row if np.isfinite(measure[i, j])):
                pair, entry = (code[start + i], code[j]), (float(measure[i, j]), start + i, int(j))
                best[pair] = min(best.get(pair, entry), entry)
    return tuple([(i, j) for _, i, j in sorted(best.values())[:count]] for best in closest)


def _drawings(images: ImageSet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns views, code points and typefaces of a set of glyphs, in which images are sorted by class and typeface."""
    typefaces = dict(glyph_classes())
    codes = [int(name.split()[0].removeprefix("U+"), 16) for name in images.class_names]
    code = np.array(codes)[images.labels]
    assert images.pixels is not None
    return images.pixels, code, np.concatenate([typefaces[c] for c in codes])


def _shown(first: int, second: int, code: np.ndarray, typeface: np.ndarray) -> list[int]:
    """Returns the closest drawings, then drawings of both classes in other typefaces, spread over the list."""
    ours, theirs = (np.flatnonzero(code == code[k]) for k in (first, second))
    both = np.intersect1d(typeface[ours], typeface[theirs])
    pairs = [(first, second)]
    for part in range(1, SHOWN):
        t = both[len(both) * part // SHOWN] if len(both) else None
        mine = ours[typeface[ours] == t] if t is not None else ours[part : part + 1]
        other = theirs[typeface[theirs] == t] if t is not None else theirs[part : part + 1]
        pairs.append((int(mine[0]), int(other[0])))
    return [k for pair in pairs for k in pair]


if __name__ == "__main__":
    TABLE.write_text(table(choose_classes(candidates())), encoding="utf-8")
