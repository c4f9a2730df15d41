"""Thumbnails inside the page, and the strips in which queries, neighbours and negatives stand side by side."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.view import Doubtful, Match, Mined, Picture, Query

RESULTS = 8  # of a query, and negatives of an anchor from either source


@dataclass(frozen=True)
class Encoder:
    """Makes a picture part of the page: shrunk to `side` pixels, as WebP of that quality."""

    side: int
    quality: int

    def __call__(self, picture: Picture) -> str:
        image = _image(picture)
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "WEBP", quality=self.quality, method=4)
        return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _image(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (3,)):
        raise InputError(f"a picture is (H, W) or (H, W, 3) uint8, not {picture.shape} {picture.dtype}: convert it first")
    return Image.fromarray(picture).convert("RGB")


def thumbnail(picture: Picture, encode: Encoder, frame: str, alt: str, under: str = "") -> Html:
    """A framed picture with a line of text under it."""
    mark = {"right": "#check", "wrong": "#cross"}.get(frame)
    return tag(
        "li",
        tag(
            "span",
            tag("img", src=encode(picture), alt=alt, width=64, height=64, decoding="async"),
            tag("svg", tag("use", href=mark), class_="mark", viewBox="0 0 12 12", aria_hidden="true") if mark else None,
            class_=f"frame {frame}",
        ),
        tag("small", under) if under else None,
    )


def _strip(found: Sequence[Match], encode: Encoder, told: Callable[[int, Match], tuple[str, str]], nothing: str = "") -> Html:
    """Pictures side by side with their similarities. `told` says how the picture of a rank is framed, and what it is."""
    if not found and nothing:
        return tag("p", nothing, class_="nothing")
    return tag(
        "ol",
        *(
            thumbnail(match.picture, encode, *told(rank, match), f"{match.similarity:.2f}".replace("-", "−"))
            for rank, match in enumerate(found[:RESULTS], start=1)
        ),
        class_="strip",
    )


def results(found: Sequence[Match], encode: Encoder) -> Html:
    """What was retrieved, nearest first, right and wrong marked by frame and sign."""

    def told(rank: int, match: Match) -> tuple[str, str]:
        verdict = "right" if match.correct else "wrong"
        return verdict, f"rank {rank}: {verdict} class"

    return _strip(found, encode, told)


def query_row(query: Query, sides: Sequence[tuple[str, Query]], encode: Encoder) -> Html:
    """A query with what each side retrieves for it; `sides` are (heading, that run's query)."""
    asked = tag("ul", thumbnail(query.picture, encode, "plain", f"query {query.key}"), class_="strip")
    return tag(
        "div",
        tag("div", tag("h5", "query"), asked),
        *(tag("div", tag("h5", heading), results(side.results, encode)) for heading, side in sides),
        class_="row sides-2" if len(sides) > 1 else "row",
    )


def mined_row(mined: Mined, number: int, encode: Encoder) -> Html:
    """An anchor, its positive, its negatives from the batch and those from the memory."""
    first = [thumbnail(mined.anchor, encode, "anchor", f"anchor {number}", "anchor")]
    if mined.positive is not None:
        first.append(thumbnail(mined.positive, encode, "positive", f"a positive of anchor {number}", "positive"))
    return tag(
        "div",
        tag("div", tag("h5", Html("&nbsp;"), aria_hidden="true"), tag("ul", *first, class_="strip")),
        tag("div", tag("h5", "from the batch"), _negatives(mined.batch, "batch", number, encode)),
        tag("div", tag("h5", "from the memory"), _negatives(mined.memory, "memory", number, encode)),
        class_="row mined",
    )


def doubtful_row(doubtful: Doubtful, encode: Encoder) -> Html:
    """An image, what is most like it in the class of its label, and in the class that it lies among."""
    asked = tag("ul", thumbnail(doubtful.picture, encode, "plain", f"image {doubtful.key}"), class_="strip")
    return tag(
        "div",
        tag("div", tag("h5", Html("&nbsp;"), aria_hidden="true"), asked),
        _side("labelled", doubtful.label, doubtful.own, encode),
        _side("lies among", doubtful.nearest, doubtful.other, encode),
        class_="row sides-2",
    )


def _side(what: str, name: str, found: Sequence[Match], encode: Encoder) -> Html:
    strip = _strip(found, encode, lambda rank, match: ("plain", f"of {name}"), "no other image")
    return tag("div", tag("h5", f"{what} ", tag("b", name)), strip)


def _negatives(found: Sequence[Match], source: str, number: int, encode: Encoder) -> Html:
    ordered = sorted(found, key=lambda match: -match.similarity)
    words = f"of anchor {number} from the {source}"
    return _strip(ordered, encode, lambda rank, match: (source, f"negative {rank} {words}"), "no valid negative")


def symbols() -> Html:
    """The check and the cross that the marks refer to; drawn, because not every font has them."""
    check = tag("symbol", tag("path", d="M2.5 6.5 5 9 9.5 3.5"), id="check", viewBox="0 0 12 12")
    cross = tag("symbol", tag("path", d="M3 3 9 9M9 3 3 9"), id="cross", viewBox="0 0 12 12")
    return tag("svg", join([check, cross]), class_="hidden", aria_hidden="true")
