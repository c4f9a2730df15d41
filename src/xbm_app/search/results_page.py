"""The results of a search as a page to look at: one self-contained file, queries with what was found for them."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from xbm_app.report.markup import Html, tag
from xbm_app.report.page import shell
from xbm_app.report.pictures import Encoder
from xbm_app.search.searcher import Hit
from xbm_app.train.files import replacing

ENCODE = Encoder(320, 80)


def write_sheet(
    out: Path, title: str, queries: Sequence[tuple[str, Image.Image, Sequence[Hit]]], picture: Callable[[int], bytes | None]
) -> Path:
    """Writes the contact sheet and returns its path.

    Args:
        queries: (name, image, results) of each.
        picture: the WebP thumbnail of an image of the index.
    """
    sections = [
        tag(
            "section",
            tag("h2", name),
            tag(
                "div",
                tag("figure", _frame(ENCODE(image), f"query {name}"), tag("figcaption", "query")),
                tag("ol", *(_result(rank, hit, picture(hit.id)) for rank, hit in enumerate(hits, start=1)), class_="strip")
                if hits
                else tag("p", "nothing found", class_="nothing"),
                class_="sheet",
            ),
        )
        for name, image, hits in queries
    ]
    heading = tag("header", tag("h1", title), tag("p", "Nearest first; the number is the similarity.", class_="extent"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as beside:
        beside.write_bytes(shell(title, tag("main", heading, *sections)).encode(errors="replace"))
    return out


def _result(rank: int, hit: Hit, webp: bytes | None) -> Html:
    source = f"data:image/webp;base64,{base64.b64encode(webp or b'').decode('ascii')}"
    alt = f"rank {rank}: {hit.label or hit.path}"
    similarity = f"{hit.similarity:.3f}".replace("-", "−")
    return tag("li", _frame(source, alt), tag("b", similarity), tag("small", hit.label or hit.path, title=hit.path))


def _frame(source: str, alt: str) -> Html:
    return tag("span", tag("img", src=source, alt=alt, decoding="async"), class_="frame")
