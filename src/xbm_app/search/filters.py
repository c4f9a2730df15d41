"""Filters on what an index stores about its rows: `label=cat`, `price<=20`, `color!=red`."""

import json
import math
import re
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import InputError, unknown

Value = str | int | float | None  # of a metadata column
OWN = ("label", "path")  # what every row has
OPERATORS = ("<=", ">=", "!=", "=", "<", ">")
SYNTAX = re.compile(r"\s*([^<>=!]+?)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*", re.DOTALL)
COLUMN_BYTES = 256_000_000  # of the columns that an open index keeps in memory for filters
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?")
TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{2}:[0-9]{2}.*)")
TRUTH = {"true": 1, "false": 0}


class Filter(NamedTuple):
    """A condition on one column. A number is compared with numbers only, a text with texts."""

    column: str
    operator: str
    value: Value

    def __str__(self) -> str:
        return f"{self.column}{self.operator}{self.value}"


def parse_filter(text: str) -> Filter:
    """Reads a condition; a value that looks like a number is one.

    Example:
        >>> parse_filter("price <= 20"), parse_filter("color=red")
        (Filter(column='price', operator='<=', value=20), Filter(column='color', operator='=', value='red'))

    Raises:
        InputError: it is not a condition.
    """
    parts = SYNTAX.fullmatch(text)
    if parts is None:
        raise InputError(f"a filter is a column, one of {' '.join(OPERATORS)}, and a value, such as price<=20; got {text!r}")
    column, operator, value = parts.groups()
    return Filter(column, operator, value if column in OWN else plain(value))


def filters_of(texts: Iterable[str] | None, label: str | None = None) -> tuple[Filter, ...]:
    """The conditions in some texts, and the one that the label is `label`."""
    labels = () if label is None else (Filter("label", "=", label),)
    filters = (*labels, *(parse_filter(text) for text in texts or ()))
    for each in filters:
        try:
            str(each).encode()
        except UnicodeError:
            raise InputError(f"{str(each)!r} is not UTF-8: write it as in the index") from None
    return filters


def plain(value: Any) -> Value:
    """A value as it is stored: texts that look like numbers, and truth values, become numbers; NaN and infinity are no values.

    Times become texts as ISO 8601 writes them, in UTC if they have a time zone, so that their order is that of texts.

    Example:
        >>> plain("20"), plain("2.5e1"), plain(True), plain("red"), plain("007"), plain(""), plain("2024-01-31 12:00")
        (20, 25.0, 1, 'red', '007', None, '2024-01-31T12:00')
    """
    if value is None or value == "" or value != value:
        return None
    if isinstance(value, bool | np.bool_):
        return int(value)
    if isinstance(value, datetime):
        return (value if value.utcoffset() is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    text = str(value)
    match = NUMBER.fullmatch(text)
    if match is None:
        time = TIME.fullmatch(text)
        return f"{time[1]}T{time[2]}" if time else text
    if match[2] or match[3]:
        return float(text)
    return int(text) if -(2**63) <= int(text) < 2**63 else text


def check_columns(filters: Sequence[Filter], columns: Iterable[str]) -> None:
    """Raises InputError for a filter on a column that the index does not have."""
    known = [*OWN, *columns]
    for each in filters:
        if each.column not in known:
            raise unknown("column", each.column, known)


def fitting(filters: Sequence[Filter], has: Callable[[str, type], bool]) -> tuple[Filter, ...]:
    """The same conditions, with true and false as the numbers that they are stored as, unless a column has texts.

    Args:
        has: whether a column has a text (str) or a number (float) in any row.
    """

    def fit(each: Filter) -> Filter:
        truth = TRUTH.get(each.value.casefold()) if isinstance(each.value, str) and each.column not in OWN else None
        return each if truth is None or has(each.column, str) else each._replace(value=truth)

    return tuple(map(fit, filters))


def refuse_misfits(filters: Sequence[Filter], has: Callable[[str, type], bool]) -> None:
    """Raises InputError if the value of a filter is a number and its column has texts only, or vice versa; `has` as above."""
    for each in filters:
        kind = str if isinstance(each.value, str) else float
        if each.column in OWN or each.value is None or has(each.column, kind):
            continue
        names = {str: ("a text", "texts only"), float: ("a number", "numbers only")}
        held = next((names[other][1] for other in names if other != kind and has(each.column, other)), "no values")
        raise InputError(f"no row meets {each}: {each.value} is {names[kind][0]}, but the column {each.column!r} has {held}")


def sql(each: Filter) -> tuple[str, list[Value]]:
    """A filter in SQL, with its values, of images `i` and their metadata `m`. The name of the column has been checked."""
    column = f"i.{each.column}" if each.column in OWN else f'm."{each.column}"'
    if each.operator == "=":
        return f"{column} IS ?", [each.value]
    if each.operator == "!=":
        return f"{column} IS NOT ?", [each.value]
    kind = "=" if isinstance(each.value, str) else "!="
    return f"({column} {each.operator} ? AND typeof({column}) {kind} 'text')", [each.value]


def expression(each: Filter) -> str:
    """A filter in Milvus's language."""
    column = each.column if each.column in OWN else f"data[{json.dumps(each.column, ensure_ascii=False)}]"
    if each.value is None:
        if each.column in OWN:
            return f'{column} {"==" if each.operator == "=" else "!="} ""' if each.operator in ("=", "!=") else "id < 0"
        return {"=": f"not exists {column}", "!=": f"exists {column}"}.get(each.operator, "id < 0")
    value = json.dumps(each.value, ensure_ascii=False)
    if each.operator == "=":
        return f"{column} == {value}"
    if each.operator == "!=":
        return f"{column} != {value}" if each.column in OWN else f"(not exists {column} or {column} != {value})"
    return f"{column} {each.operator} {value}"


def matches(each: Filter, row: Mapping[str, Value]) -> bool:
    """Whether a row meets the condition: what every engine has to compute.

    Example:
        >>> matches(parse_filter("price<20"), {"price": 3}), matches(parse_filter("price<20"), {"price": "cheap"})
        (True, False)
    """
    value = row.get(each.column)
    if each.operator in ("=", "!="):
        return (value == each.value) == (each.operator == "=")
    if value is None or each.value is None or isinstance(value, str) != isinstance(each.value, str):
        return False
    a: Any = value
    b: Any = each.value
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[each.operator]


# ------------------------------------------------------------------ the same for all rows at once


class Column:
    """The values of all rows in one column, as ranks: first the numbers, then the texts, then the missing.

    A number equals a number and precedes it as in Python, whether int or float, so every filter is a range of ranks.

    Attributes:
        ranks: (N,) int32, of the rows in their order.
        bytes: of memory.
    """

    def __init__(self, values: Iterable[Value], most: int = COLUMN_BYTES) -> None:
        """Raises MemoryError if this takes more than `most` bytes."""
        place: dict[Value, int] = {}
        places, self.bytes = array("i"), 0
        for value in values:
            if value not in place:
                self.bytes += sys.getsizeof(value) + 8
                if self.bytes > most:
                    raise MemoryError
            places.append(place.setdefault(value, len(place)))
        self.bytes += 4 * len(places)
        if self.bytes > most:
            raise MemoryError
        self._numbers = sorted(value for value in place if isinstance(value, int | float))
        self._texts = sorted(value for value in place if isinstance(value, str))
        rank = np.full(len(place), -1, np.int32)
        for number, value in enumerate([*self._numbers, *self._texts, *([None] if None in place else [])]):
            rank[place[value]] = number
        self.ranks = rank[np.frombuffer(places, np.int32)] if places else np.empty(0, np.int32)

    def meets(self, each: Filter) -> np.ndarray:
        """(N,) bool: what `matches` says about every row.

        Example:
            >>> Column([3, "cheap", None, 30.5]).meets(parse_filter("price<20"))
            array([ True, False, False, False])
        """
        first, end = self._range(each)
        met = (self.ranks >= first) & (self.ranks < end)
        return ~met if each.operator == "!=" else met

    def _range(self, each: Filter) -> tuple[int, int]:
        """The ranks of the values that meet a filter; for !=, of those that do not."""
        here: Any = self._texts if isinstance(each.value, str) else self._numbers
        begin = len(self._numbers) if isinstance(each.value, str) else 0
        if each.value is None or each.value != each.value:  # NaN is no value in SQL either
            missing = len(self._numbers) + len(self._texts)
            return (missing, missing + 1) if each.operator in ("=", "!=") else (0, 0)
        left, right = begin + bisect_left(here, each.value), begin + bisect_right(here, each.value)
        end = begin + len(here)
        ranges = {"<": (begin, left), "<=": (begin, right), ">": (right, end), ">=": (left, end)}
        return ranges.get(each.operator, (left, right))


class Columns:
    """The columns that filters have asked for, of one content of an index. Those used longest ago make room for new ones."""

    def __init__(self, most: int = COLUMN_BYTES) -> None:
        self._most, self._kept = most, dict[str, Column | None]()

    def get(self, name: str, read: Callable[[], Iterable[Value]]) -> Column | None:
        """The column, read if need be; None if it is too large."""
        if name in self._kept:
            self._kept[name] = self._kept.pop(name)  # the last is the one used last
            return self._kept[name]
        try:
            column: Column | None = Column(read(), self._most)
        except MemoryError:
            column = None
        self._kept[name] = column
        for oldest in list(self._kept):
            if self.bytes <= self._most:
                break
            if self._kept[oldest] is not None:
                del self._kept[oldest]
        return column

    @property
    def bytes(self) -> int:
        return sum(column.bytes for column in self._kept.values() if column is not None)
