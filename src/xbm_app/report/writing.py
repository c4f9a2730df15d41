"""How a report writes: each kind of number in one way, HTML that escapes its text by default, and the page around it.

Since text is escaped, data cannot become a tag. The page is self-contained.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from xbm_app.report.groups import Stat

MISSING = "–"
VOID = frozenset({"img", "meta", "link", "br", "hr"})

# ------------------------------------------------------------------ how numbers are written


def percent(fraction: float) -> str:
    """A fraction in percent, without the percent sign: 0.6684 is "66.8"."""
    return MISSING if math.isnan(fraction) else f"{100 * fraction:.1f}".replace("-", "−")


def signed(fraction: float) -> str:
    """A difference of fractions in percentage points: "+5.6", "−0.3"."""
    return f"{100 * fraction:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def plus_minus(stat: Stat, sign: bool = False) -> str:
    """ "66.8 ± 0.4", or "66.8" if there is no standard error."""
    return (signed(stat.mean) if sign else percent(stat.mean)) + error_bar(stat)


def error_bar(stat: Stat) -> str:
    """ " ± 0.4" in percentage points, never rounded to zero; empty if there is no standard error."""
    if math.isnan(stat.error):
        return ""
    digits = ".1f" if stat.error >= 0.0005 or stat.error == 0 else ".1g"
    return f" ± {100 * stat.error:{digits}}"


def seeds(count: int) -> str:
    """ "one seed", "3 seeds"."""
    return "one seed" if count == 1 else f"{count} seeds"


def recorded_device(text: str) -> str:
    """A device as a result file has it; older files say "1 threads".

    Example:
        >>> recorded_device("cpu, 1 threads"), recorded_device("cpu, 11 threads")
        ('cpu, 1 thread', 'cpu, 11 threads')
    """
    return re.sub(r"\b1 threads\b", "1 thread", text)


def count(value: float) -> str:
    """A number of pairs: whole from 10 upwards, otherwise with two significant digits."""
    if math.isnan(value):
        return MISSING
    if value >= 9.95 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def times(ratio: float) -> str:
    """A ratio in words: "310 times", "1.4 times"."""
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 0.0413 is "41.3 ms", 90 is "90.0 s", 5400 is "1 h 30 min"."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 300:
        value, unit = (1000 * seconds, "ms") if seconds < 1 else (seconds, "s")
        return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}" if value >= 0.95 else f"{value:.1g} {unit}"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def change(before: float, after: float) -> str:
    """A relative change in percent, with its sign: "+17 %"."""
    return f"{100 * (after / before - 1):+.0f}\u00a0%".replace("-", "−")


def distance(value: float) -> str:
    """A squared distance between unit vectors."""
    return MISSING if math.isnan(value) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def loss_name(loss: str) -> str:
    """A loss as people write it: "multi_similarity" is "multi similarity", "ms" is "MS"."""
    return loss.upper() if len(loss) < 3 else loss.replace("_", " ")


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# ------------------------------------------------------------------ HTML


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
