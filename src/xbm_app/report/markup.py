"""Markup in which text is escaped unless it says that it is markup: what comes from data cannot become a tag."""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"img", "meta", "link", "br", "hr"})


class Html(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: object) -> Html:
    """An element. Plain strings are escaped, `Html` is kept; attributes that are None or False are left out.

    An underscore in an attribute's name is a hyphen, one at its end is dropped (`class_`).

    Example:
        >>> tag("p", "a < b ", tag("b", "c"), class_="note")
        '<p class="note">a &lt; b <b>c</b></p>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Parts one after the other; plain strings are escaped, None is nothing.

    Example:
        >>> join(["1 < 2", None, tag("br")])
        '1 &lt; 2<br>'
    """
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
