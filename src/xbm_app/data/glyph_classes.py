"""Which characters are classes of their own: measured, so that no class can be taken for another.

A character and its look-alike in two classes would be a false negative in every batch, and a memory multiplies it. So the
characters are taken one after another, and one whose drawings come too close to those of an earlier one is left out: the
earlier one stands for both. That takes minutes, so its result is `glyph_classes.txt` next to this file;
`python -m xbm_app.data.glyph_classes` measures and writes it anew.
"""

import unicodedata
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from xbm_app.data.glyph_render import TYPEFACES, charmap, draw, normalise, read_outlines
from xbm_app.progress import track

TABLE = Path(__file__).with_name("glyph_classes.txt")
MIN_DRAWINGS = 6  # a class has at least this many different drawings
CANVAS, SIDE = 28, 24  # pixels: glyphs are compared at the size they have in a 32-pixel view
LEVELS = 15  # of grey: few enough for sums of products to be exact in float32, whatever the order they are added in
TOLERANCE = 1  # pixels: ink this close to ink of the other drawing is matched
MIN_UNMATCHED = 6.3  # pixels of ink: drawings with less than this unmatched on either side are look-alikes ...
MIN_UNMATCHED_BOLD = 0.48  # ... and so are those with less than this × √ink, since bold strokes differ in more pixels
MAX_ALIKE = 0.25  # a character is left out when more than this part of its drawings are look-alikes
BLOCK = 48  # characters measured at a time
# Views turn, lean and stretch a glyph, so the closest of these counts: (radians, shear, width by height).
TURNS = ((0, 0, 1.0), (-0.2, 0, 1.0), (0.2, 0, 1.0), (0, -0.2, 1.0), (0, 0.2, 1.0), (0, 0, 0.85), (0, 0, 1 / 0.85))
# Box drawing, blocks and Braille are patterns on a grid: without scale and position they mean nothing.
GRIDS = (range(0x2500, 0x25A0), range(0x2800, 0x2900))


@dataclass(frozen=True)
class Drawings:
    """The different drawings of one character: positions in `TYPEFACES`, and normalised outlines."""

    code: int
    typefaces: tuple[int, ...]
    outlines: list[np.ndarray]


@cache
def glyph_classes() -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The classes: each a code point and the positions in `TYPEFACES` of the typefaces that it is drawn in."""
    rows = (line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    bits = range(len(TYPEFACES))
    return tuple((int(code, 16), tuple(k for k in bits if int(mask, 16) >> k & 1)) for code, mask, *_ in rows)


def is_candidate(code: int) -> bool:
    """Whether a code point is a visible character that is not a variant of another.

    Spaces, marks, controls and private use are out; so are compatibility forms of a single character (² is a 2),
    fractions, and letters with two marks, whose parts are a few pixels each.
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
    """Characters with enough different drawings: letters before letters with a mark, well covered ones first."""
    shapes: dict[int, dict[bytes, tuple[int, np.ndarray]]] = {}
    for position, typeface in enumerate(TYPEFACES):
        codes = sorted(code for code in charmap(typeface) if code in among and is_candidate(code))
        drawn = [(c, normalise(edges)) for c, edges in zip(codes, read_outlines(typeface, codes)) if len(edges)]
        for (code, outline), image in zip(drawn, turned([outline for _, outline in drawn], TURNS[0])):
            # A typeface that repeats another's drawing (an arrow, upright and oblique) adds nothing.
            shapes.setdefault(code, {}).setdefault(image.tobytes(), (position, outline))
    found = [
        Drawings(code, tuple(k for k, _ in drawn.values()), [outline for _, outline in drawn.values()])
        for code, drawn in shapes.items()
        if len(drawn) >= MIN_DRAWINGS
    ]
    return sorted(found, key=lambda d: (len(unicodedata.normalize("NFD", chr(d.code))), -len(d.typefaces), d.code))


def turned(outlines: Sequence[np.ndarray], turn: tuple[float, float, float]) -> np.ndarray:
    """(G, CANVAS, CANVAS) uint8 drawings in 0..LEVELS: rotated, sheared and stretched."""
    angle, shear, stretch = turn
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = matrix @ np.array([[1, shear], [0, 1]]) @ np.diag([stretch**0.5, stretch**-0.5]) * SIDE
    matrix = np.concatenate([matrix, np.full((2, 1), CANVAS / 2)], axis=1)
    images = draw(outlines, np.broadcast_to(matrix, (len(outlines), 2, 3)), CANVAS)
    return np.rint(images * LEVELS).astype(np.uint8)


def ink_and_far(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ink of drawings, and where no ink is near: two arrays (G, CANVAS²) float32 in 0..LEVELS."""
    near = np.pad(images, ((0, 0), (TOLERANCE, TOLERANCE), (TOLERANCE, TOLERANCE)))
    for axis in (1, 2):
        parts = [np.take(near, range(k, k + CANVAS), axis) for k in range(2 * TOLERANCE + 1)]
        near = np.maximum.reduce(parts)
    flat = (len(images), CANVAS * CANVAS)
    return images.reshape(flat).astype(np.float32), (LEVELS - near).reshape(flat).astype(np.float32)


def unmatched(ink: np.ndarray, far: np.ndarray, other_ink: np.ndarray, other_far: np.ndarray) -> np.ndarray:
    """(G, H) pixels of ink that the other drawing of a pair has none near to; of both sides the larger."""
    return np.maximum(ink @ other_far.T, far @ other_ink.T) / np.float32(LEVELS * LEVELS)


def alike(apart: np.ndarray, ink: np.ndarray, other_ink: np.ndarray) -> np.ndarray:
    """(G, H) bool: pairs of drawings, `apart` pixels apart, that a person could take for one another."""
    mass = np.minimum(ink.sum(axis=1)[:, None], other_ink.sum(axis=1)[None]) / np.float32(LEVELS)
    return apart < np.maximum(np.float32(MIN_UNMATCHED), np.float32(MIN_UNMATCHED_BOLD) * np.sqrt(mass))


class _Kept:
    """The drawings that are in, at every turn."""

    def __init__(self) -> None:
        empty = np.empty((0, CANVAS, CANVAS), np.uint8)
        self.images = [empty] * len(TURNS)
        self.code = np.empty(0, np.int64)

    def add(self, code: int, images: list[np.ndarray]) -> None:
        self.images = [np.concatenate(pair) for pair in zip(self.images, images)]
        self.code = np.append(self.code, np.full(len(images[0]), code))


def _clashes(images: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    """(G, H) bool: look-alikes at the closest turn of either side."""
    ink, far = ink_and_far(images[0])
    other_ink, other_far = ink_and_far(others[0])
    apart = np.full((len(ink), len(other_ink)), np.inf, np.float32)
    for mine, theirs in zip(images, others):
        np.minimum(apart, unmatched(*ink_and_far(mine), other_ink, other_far), out=apart)
        np.minimum(apart, unmatched(ink, far, *ink_and_far(theirs)), out=apart)
    return alike(apart, ink, other_ink)


def choose_classes(found: Sequence[Drawings], quiet: bool = False) -> list[tuple[int, tuple[int, ...]]]:
    """The characters of `found`, in order, that are not taken for one before them, with the drawings that are not."""
    kept, chosen = _Kept(), []
    stands_for: dict[int, int] = {}  # a look-alike and the class that stands for it
    spelled: dict[tuple[int, str], int] = {}  # (letter, marks) and the class that has them
    for start in track(range(0, len(found), BLOCK), "measuring look-alikes", quiet=quiet):
        block = found[start : start + BLOCK]
        outlines = [outline for drawings in block for outline in drawings.outlines]
        code = np.repeat([d.code for d in block], [len(d.outlines) for d in block])
        images = [turned(outlines, turn) for turn in TURNS]
        clash = np.concatenate([_clashes(images, kept.images), _clashes(images, images)], axis=1)
        other = np.concatenate([kept.code, code])
        taken = np.concatenate([np.ones(len(kept.code), bool), np.zeros(len(code), bool)])
        before = len(kept.code)
        for drawings in block:
            rows = np.flatnonzero(code == drawings.code)
            hits = clash[rows] & taken
            bad = hits.any(axis=1)
            spelt = unicodedata.normalize("NFD", chr(drawings.code))
            letter, marks = ord(spelt[0]), spelt[1:]
            # Ć and ć differ by how far up the mark sits: once c is a look-alike of C, so are they.
            spelling = (stands_for.get(letter, letter), marks)
            if bad.sum() > MAX_ALIKE * len(rows) or (~bad).sum() < MIN_DRAWINGS:
                nearest = Counter(other[np.nonzero(hits)[1]].tolist()).most_common(1)[0][0]
                stands_for[drawings.code] = nearest
            elif marks and spelling in spelled:
                stands_for[drawings.code] = spelled[spelling]
            else:
                spelled[spelling] = drawings.code
                taken[before + rows[~bad]] = True
                kept.add(drawings.code, [turn[rows[~bad]] for turn in images])
                chosen.append((drawings.code, tuple(t for t, out in zip(drawings.typefaces, bad) if not out)))
    return sorted(chosen)


def table(chosen: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """The text of `glyph_classes.txt`."""
    rows = [f"{code:04X} {sum(1 << k for k in typefaces):04X} {chr(code)}" for code, typefaces in chosen]
    head = "# code point, typefaces (bit k: TYPEFACES[k]), character; made by python -m xbm_app.data.glyph_classes"
    return "\n".join([head, *rows, ""])


if __name__ == "__main__":
    TABLE.write_text(table(choose_classes(candidates())), encoding="utf-8")
