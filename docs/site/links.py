"""Checks the links and anchors of the project's pages, and of the built site: python docs/site/links.py site

Links to other sites are only parsed: no test depends on the network.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FENCE = re.compile(r"^(?:```.*?^```|    .*?$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
SCHEMES = {"http", "https", "mailto", "data"}


def without_code(text: str) -> str:
    return CODE.sub("", FENCE.sub("", text))


def anchors_of(text: str) -> set[str]:
    """The anchors of a Markdown page as GitHub makes them, and those of the names that the reference pages show."""
    seen: dict[str, int] = {}
    anchors = set()
    for match in HEADING.finditer(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        anchors.add(slug if not count else f"{slug}-{count}")
    return anchors | set(DIRECTIVE.findall(text))


def outside(address: str) -> str | None:
    """What is wrong with the form of an address of another site, if anything; no test calls it up."""
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES:
        return f"unknown scheme in {address}"
    if parts.scheme.startswith("http") and ("." not in (parts.hostname or "") and parts.hostname != "localhost"):
        return f"no host in {address}"
    return None


def broken_in_page(page: Path, root: Path) -> Iterator[str]:
    """The links of a Markdown page that lead nowhere within the repository."""
    text = page.read_text(encoding="utf-8")
    for match in LINK.finditer(without_code(text)):
        address = match[1]
        if urlsplit(address).scheme:
            wrong = outside(address)
            if wrong:
                yield f"{page.relative_to(root)}: {wrong}"
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        if not target.exists() or root not in (target, *target.parents):
            yield f"{page.relative_to(root)}: {address} does not exist"
        elif anchor and target.suffix == ".md" and unquote(anchor) not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{page.relative_to(root)}: {address} has no such anchor"


class Page(HTMLParser):
    """The links and the anchors of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []  # what a browser fetches by itself
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name") and tag != "meta":
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.append(value)
                if tag != "a" and dict(attrs).get("rel") not in ("canonical", "prev", "next", "alternate"):
                    self.loaded.append(value)


def broken_in_site(site: Path) -> Iterator[str]:
    """The links of a built site that lead nowhere, and whatever its pages would fetch from elsewhere."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for any folder of the server
            continue
        here = path.relative_to(site)
        yield from (f"{here}: fetches {address}" for address in page.loaded if urlsplit(address).netloc)
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                wrong = outside(address)
                if wrong:
                    yield f"{here}: {wrong}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{here}: {address} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{here}: {address} has no such anchor"


if __name__ == "__main__":
    found = list(broken_in_site(Path(sys.argv[1])))
    print("\n".join(found) if found else f"{sys.argv[1]}: no broken link")
    sys.exit(bool(found))
