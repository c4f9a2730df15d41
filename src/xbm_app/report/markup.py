"""HTML that escapes its text by default, so that data cannot become a tag; and the self-contained page around it."""

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

VOID = frozenset({"img", "meta", "link", "br", "hr"})


class Html(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: object) -> Html:
    """An element. Plain strings are escaped, `Html` is kept; attributes that are None or False are omitted.

    Underscores in attribute names become hyphens; a trailing underscore is removed (`class_`).

    Example:
        >>> tag("p", "a < b ", tag("b", "c"), class_="note")
        '<p class="note">a &lt; b <b>c</b></p>'
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    return Html(f"<{opening}>" if name in VOID else f"<{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Concatenates parts; plain strings are escaped, None is skipped.

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


def shell(title: str, *content: Html, script: str = "") -> bytes:
    """A page with `content` as its body; style and script are inline and nothing is fetched.

    Args:
        script: name of a JavaScript file in this folder.
    """
    source = _read(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    # The browser enforces that the page fetches nothing: images are embedded, style and script are its own.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_read("style.css"))),
    )
    body = tag("body", *content, tag("script", Html(source)) if script else None)
    page = f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
    return page.encode(errors="replace")  # file names need not be valid text


@cache
def _read(name: str) -> str:
    return files("xbm_app.report").joinpath(name).read_text(encoding="utf-8")
