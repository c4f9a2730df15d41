"""What a page is made of: paragraphs, tables and figures, written as Markdown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from paper.study import Spread

Block = Union[str, "Table", "Figure", "Pictures"]  # a plain string is a paragraph
NONE = "–"


class Claim(str):
    """A paragraph that says whether something the paper claims was found; the page begins with all of them."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """Cells of text; the first column is left-aligned, the others are figures."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Attributes:
        name: of its file, without suffix.
        data: what is drawn, as plain values, see `xbm_app/report/panels.py`: the file says from which values it was made.
        caption: says what is to be seen.
    """

    name: str
    data: Any
    caption: str


@dataclass(frozen=True)
class Pictures:
    """Rows of photographs, which need the data set to be drawn.

    Attributes:
        data: the data set they are from.
        rows: each a list of tiles.
    """

    name: str
    data: str
    rows: Sequence[Sequence["Tile"]]
    caption: str


class Tile(NamedTuple):
    """One photograph of a sheet.

    Attributes:
        part: the set it is in: "train", "query" or "gallery".
        image: its position there.
        frame: how it is framed: a key of `sheet.FRAMES`.
    """

    part: str
    image: int
    frame: str
    words: str


def percent(value: float | None) -> str:
    """A fraction in percent: 0.6684 is "66.8"."""
    return NONE if value is None or math.isnan(value) else f"{100 * value:.1f}"


def printed(value: float | None) -> str:
    """A figure of the paper, which is in percent already."""
    return NONE if value is None else f"{value:.1f}"


def spread(found: Spread | None, sign: bool = False) -> str:
    """ "66.8 ± 0.4": mean and standard error in percent; the mean alone for one seed."""
    if found is None or not len(found):
        return NONE
    mean = f"{100 * found.mean:+.1f}" if sign else percent(found.mean)
    return mean.replace("-", "−") if math.isnan(found.error) else f"{mean} ± {100 * found.error:.1f}".replace("-", "−")


def seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
