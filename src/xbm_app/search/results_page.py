"""The page that `xbm search --sheet` writes: one self-contained HTML file, each query with its results."""

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from xbm_app.files import write_bytes
from xbm_app.report.galleries import Encoder, strip, webp_uri
from xbm_app.report.writing import Html, shell, tag
from xbm_app.search.searcher import Hit

ENCODE = Encoder(320, 80)
Query = tuple[str, Image.Image | None, Sequence[Hit]]  # its name, or its text where there is no image, and its results


def write_results_page(
    out: Path,
    title: str,
    queries: Sequence[Query],
    thumbnail: Callable[[int], bytes | None],
) -> Path:
    """Writes the page and returns its path.

    Args:
        thumbnail: returns the WebP thumbnail of an image of the index.
    """
    sections = []
    for name, image, hits in queries:
        picture = [] if image is None else [_frame(ENCODE(image), f"query {name}")]
        query = tag("figure", *picture, tag("figcaption", "query" if picture else "query by text"))
        results = [_result(rank, hit, thumbnail(hit.id)) for rank, hit in enumerate(hits, start=1)]
        sections.append(tag("section", tag("h2", name), tag("div", query, strip(results, "nothing found"), class_="sheet")))
    heading = tag("header", tag("h1", title), tag("p", "Nearest first; the number is the similarity.", class_="extent"))
    write_bytes(out, shell(title, tag("main", heading, *sections)))
    return out


def _result(rank: int, hit: Hit, webp: bytes | None) -> Html:
    name = hit.label or hit.path
    similarity = f"{hit.similarity:.3f}".replace("-", "−")
    image = _frame(webp_uri(webp or b""), f"rank {rank}: {name}")
    return tag("li", image, tag("b", similarity), tag("small", name, title=hit.path))


def _frame(source: str, alt: str) -> Html:
    return tag("span", tag("img", src=source, alt=alt, decoding="async"), class_="frame")
