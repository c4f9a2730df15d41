"""What an index knows about each of its rows, whichever engine keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xbm.errors import XbmError
from xbm_app.search.filters import Value


class UnavailableError(XbmError):
    """The engine that keeps an index does not answer; a later call may succeed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One image, or one box in an image, to be added.

    Attributes:
        path: relative to the root of the source, with forward slashes.
        label: its folder, or the label in the table; may be empty.
        size: bytes of its file.
        time: modification time of its file, in ns.
        data: what else is known about it, by the name of the column.
    """

    path: str
    label: str
    size: int
    time: int
    box: tuple[int, int, int, int] | None = None
    data: Mapping[str, Value] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the image: its path and, as text, its box."""
        return self.path, "" if self.box is None else ",".join(map(str, self.box))


class Known(NamedTuple):
    """What the catalogue stores about an image, to tell whether it has changed."""

    id: int
    label: str
    size: int
    time: int


KnownRows = Mapping[tuple[str, str], Known]  # by `Entry.key`


class Item(NamedTuple):
    """An image as a search result shows it."""

    id: int
    path: str
    label: str
    data: dict[str, Value] = {}  # noqa: RUF012
