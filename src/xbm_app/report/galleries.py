"""The report's sections of images: what is retrieved, what the memory mines, which labels are likely wrong.

`strip` lays out images side by side, here and on the page that `xbm search --sheet` writes.
"""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.report.groups import Comparison, Doubtful, Group, Match, Mined, Picture, Query, RunView
from xbm_app.report.writing import Html, join, loss_name, tag

T = TypeVar("T")

QUERIES, ANCHORS = 24, 12  # on the whole page
RESULTS = 8  # per query, and negatives per anchor from either source
OPEN = 4  # rows that are visible before the reader expands a gallery; at least 2 in each of several galleries

# ------------------------------------------------------------------ images


@dataclass(frozen=True)
class Encoder:
    """Turns a picture into a data URI: shrunk to `side` pixels, as WebP of that quality."""

    side: int
    quality: int

    def __call__(self, picture: Picture) -> str:
        image = _image(picture)
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "WEBP", quality=self.quality, method=4)
        return webp_uri(file.getvalue())


def _image(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (3,)):
        raise InputError(f"a picture must be (H, W) or (H, W, 3) uint8, got {picture.shape} {picture.dtype}")
    return Image.fromarray(picture).convert("RGB")


def webp_uri(content: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(content).decode('ascii')}"


def strip(items: Sequence[Html], nothing: str = "") -> Html:
    """Images side by side, in order; or the words `nothing` if there are none."""
    return tag("ol", *items, class_="strip") if items or not nothing else tag("p", nothing, class_="nothing")


def _matches(
    matches: Sequence[Match], encode: Encoder, framed: Callable[[int, Match], tuple[str, str]], nothing: str = ""
) -> Html:
    """A strip of images with their similarities. `framed` returns the frame and the description of the image at a rank."""
    items = []
    for rank, match in enumerate(matches[:RESULTS], start=1):
        similarity = f"{match.similarity:.2f}".replace("-", "−")
        items.append(_thumbnail(match.picture, encode, *framed(rank, match), similarity))
    return strip(items, nothing)


def _thumbnail(picture: Picture, encode: Encoder, frame: str, alt: str, under: str = "") -> Html:
    """A framed picture with a line of text under it."""
    image = tag("img", src=encode(picture), alt=alt, width=64, height=64, decoding="async")
    mark = _mark(frame) if frame in ("right", "wrong") else None
    return tag("li", tag("span", image, mark, class_=f"frame {frame}"), tag("small", under) if under else None)


def _mark(kind: str) -> Html:
    symbol = tag("use", href="#check" if kind == "right" else "#cross")
    return tag("svg", symbol, class_="mark", viewBox="0 0 12 12", aria_hidden="true")


def symbols() -> Html:
    """The check mark and the cross that the marks refer to; drawn, because not every font has them."""
    check = tag("symbol", tag("path", d="M2.5 6.5 5 9 9.5 3.5"), id="check", viewBox="0 0 12 12")
    cross = tag("symbol", tag("path", d="M3 3 9 9M9 3 3 9"), id="cross", viewBox="0 0 12 12")
    return tag("svg", check, cross, class_="hidden", aria_hidden="true")


# ------------------------------------------------------------------ rows of a gallery


def query_row(query: Query, sides: Sequence[tuple[str, Query]], encode: Encoder) -> Html:
    """A query with what each side retrieves for it; `sides` are (heading, that run's query)."""

    def framed(rank: int, match: Match) -> tuple[str, str]:
        verdict = "right" if match.correct else "wrong"
        return verdict, f"rank {rank}: {verdict} class"

    image = tag("ul", _thumbnail(query.picture, encode, "plain", f"query {query.key}"), class_="strip")
    return tag(
        "div",
        tag("div", tag("h5", "query"), image),
        *(tag("div", tag("h5", heading), _matches(side.results, encode, framed)) for heading, side in sides),
        class_="row sides-2" if len(sides) > 1 else "row",
    )


def mined_row(mined: Mined, number: int, encode: Encoder) -> Html:
    """An anchor, its positive, its negatives from the batch and those from the memory."""
    first = [_thumbnail(mined.anchor, encode, "anchor", f"anchor {number}", "anchor")]
    if mined.positive is not None:
        first.append(_thumbnail(mined.positive, encode, "positive", f"a positive of anchor {number}", "positive"))

    def negatives(source: str, matches: Sequence[Match]) -> Html:
        def framed(rank: int, match: Match) -> tuple[str, str]:
            return source, f"negative {rank} of anchor {number} from the {source}"

        ordered = sorted(matches, key=lambda match: -match.similarity)
        return tag("div", tag("h5", f"from the {source}"), _matches(ordered, encode, framed, "no valid negative"))

    return tag(
        "div",
        tag("div", tag("h5", Html("&nbsp;"), aria_hidden="true"), tag("ul", *first, class_="strip")),
        negatives("batch", mined.batch),
        negatives("memory", mined.memory),
        class_="row mined",
    )


def doubtful_row(doubtful: Doubtful, encode: Encoder) -> Html:
    """An image, and the most similar images of the class of its label and of the class it is nearest to."""

    def side(what: str, name: str, matches: Sequence[Match]) -> Html:
        images = _matches(matches, encode, lambda rank, match: ("plain", f"of {name}"), "no other image")
        return tag("div", tag("h5", f"{what} ", tag("b", name)), images)

    image = tag("ul", _thumbnail(doubtful.picture, encode, "plain", f"image {doubtful.key}"), class_="strip")
    return tag(
        "div",
        tag("div", tag("h5", Html("&nbsp;"), aria_hidden="true"), image),
        side("labeled", doubtful.label, doubtful.own),
        side("nearest class", doubtful.nearest, doubtful.other),
        class_="row sides-2",
    )


# ------------------------------------------------------------------ the sections


def retrieval(groups: Sequence[Group], comparisons: Sequence[Comparison], encode: Encoder) -> Html | None:
    """The same queries without and with memory, side by side; without a comparison, those of one run."""
    most, visible = max(1, QUERIES // max(1, len(comparisons))), _visible(len(comparisons))
    galleries = [gallery for c in comparisons if (gallery := _side_by_side(c, encode, most, visible)) is not None]
    if not galleries:
        runs = [run for group in sorted(groups, key=_rank) for run in group.runs if run.queries]
        galleries = [_alone(run, encode) for run in runs[:1]]
    if not galleries:
        return None
    right, wrong = (tag("span", _mark(kind), class_=f"sign {kind}") for kind in ("right", "wrong"))
    return _explained(
        join([right, " the query’s class, ", wrong, " another class. Nearest first; the number is the similarity."]), galleries
    )


def mining(groups: Sequence[Group], comparisons: Sequence[Comparison], encode: Encoder) -> Html | None:
    """Anchors with their negatives from batch and memory, of one run per loss."""
    chosen = [c.with_memory for c in comparisons if any(run.mined for run in c.with_memory.runs)] or [
        group for group in groups if group.memory and any(run.mined for run in group.runs)
    ][:1]
    if not chosen:
        return None
    galleries = []
    for group in chosen:
        run = next(run for run in group.runs if run.mined)
        shown = run.mined[: max(1, ANCHORS // len(chosen))]
        rows = [mined_row(mined, i, encode) for i, mined in enumerate(shown, start=1)]
        words = _hardest(shown)
        galleries.append(_gallery(f"{group.label}, seed {run.seed}", rows, "anchors", words, _visible(len(chosen))))
    words = "Valid negatives of some anchors, most similar first; the number is the similarity (the paper’s Figure 5)."
    return _explained(Html(words), galleries)


def doubts(groups: Sequence[Group], encode: Encoder) -> Html | None:
    """Images whose labels are likely wrong, of the best run that has some: other runs of the data would show the same."""
    runs = [(group, run) for group in sorted(groups, key=_rank) for run in group.runs if run.doubtful]
    if not runs:
        return None
    group, run = runs[0]
    rows = [doubtful_row(doubtful, encode) for doubtful in run.doubtful[:ANCHORS]]
    words = (
        "Training images that are more similar to another class than to their own, the most suspicious first; the run’s "
        "<code>doubted.csv</code> lists all of them. Beside each image are the most similar ones of both classes. Their labels "
        "were not used for training while they were in doubt."
    )
    return _explained(Html(words), [_gallery(f"{group.label}, seed {run.seed}", rows, "images", "")])


def _explained(words: Html, galleries: Sequence[Html]) -> Html:
    return join([tag("p", words, class_="explain"), *galleries])


def _visible(galleries: int) -> int:
    return max(2, OPEN // max(1, galleries))


def _side_by_side(c: Comparison, encode: Encoder, most: int, visible: int) -> Html | None:
    pair = _same_seed(c.without.runs, c.with_memory.runs)
    if pair is None:
        return None
    without, with_memory = ({query.key: query for query in run.queries} for run in pair)
    keys = _sampled([key for key in without if key in with_memory], most)
    if not keys:
        return None
    firsts = {key: (_first(without[key]), _first(with_memory[key])) for key in keys}
    words = [pair[1].chosen]
    if len(pair[0].right) == len(pair[1].right) > 0:
        gained, lost = (int((a.right < b.right).sum()) for a, b in (pair, pair[::-1]))
        keys = _in_proportion(keys, firsts, gained, lost)
        words.append(_supports(c, len(pair[0].right), gained, lost))
    rows = [
        query_row(without[key], [("without memory", without[key]), ("with memory", with_memory[key])], encode) for key in keys
    ]
    seeds = {run.seed for run in pair}
    heading = f"{loss_name(c.loss)}, seed {seeds.pop()}" if len(seeds) == 1 else loss_name(c.loss)
    return _gallery(heading, rows, "queries", " ".join(word for word in words if word), visible)


def _first(query: Query) -> bool:
    return bool(query.results) and query.results[0].correct


def _in_proportion(keys: Sequence[str], firsts: dict[str, tuple[bool, bool]], gained: int, lost: int) -> list[str]:
    """Queries that one side alone gets right come first, gains and losses in the proportion that they have among all."""
    gains, losses = ([key for key in keys if firsts[key] == one_sided] for one_sided in ((False, True), (True, False)))
    share, ordered = gained / max(1, gained + lost), list[str]()
    for k in range(len(gains) + len(losses)):
        gain = int(share * (k + 1) + 0.5) > int(share * k + 0.5)
        ordered.append((gains if gains and (gain or not losses) else losses).pop(0))
    return ordered + [key for key in keys if key not in ordered]


def _supports(c: Comparison, count: int, gained: int, lost: int) -> str:
    """What these runs got right over all queries, and a warning if that is not what the headline says."""
    sentence = (
        f"Over all {count:,} queries, the nearest image has the right class only with memory for {gained:,}, and only without "
        f"for {lost:,}; such queries come first, in this proportion."
    )
    if (gained - lost) * c.gain.mean < 0 or (gained == lost and c.outcome in ("gain", "loss")):
        sentence += " This pair of runs does not show the difference that the page starts with, which is a mean over seeds."
    return sentence


def _alone(run: RunView, encode: Encoder) -> Html:
    rows = [query_row(query, [("nearest first", query)], encode) for query in _sampled(run.queries, QUERIES)]
    return _gallery(f"{run.group}, seed {run.seed}", rows, "queries", run.chosen)


def _gallery(heading: str, rows: Sequence[Html], what: str, words: str, visible: int = OPEN) -> Html:
    more = rows[visible:]
    return tag(
        "div",
        tag("h3", heading),
        tag("p", words) if words else None,
        tag("div", *rows[:visible], class_="rows"),
        tag("details", tag("summary", f"{len(more)} more {what}"), tag("div", *more, class_="rows")) if more else None,
        class_="gallery",
    )


def _hardest(shown: Sequence[Mined]) -> str:
    """How much harder the memory's negatives are than the batch's, over the anchors shown."""
    means = []
    for source in ("batch", "memory"):
        hardest = [max(m.similarity for m in matches) for mined in shown if (matches := getattr(mined, source))]
        if hardest:
            anchors = f"{len(hardest)} of {len(shown)} anchors have one"
            means.append(f"{sum(hardest) / len(hardest):.2f} from the {source} ({anchors})")
    return f"Mean similarity of the hardest negative: {', '.join(means)}." if means else ""


def _same_seed(without: Iterable[RunView], with_memory: Iterable[RunView]) -> tuple[RunView, RunView] | None:
    pairs = [(a, b) for a in without for b in with_memory if a.queries and b.queries]
    return min(pairs, key=lambda pair: (pair[0].seed != pair[1].seed, pair[0].seed), default=None)


def _sampled(items: Sequence[T], most: int) -> list[T]:
    """At most that many, from the whole list: the first ones could all be alike."""
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else list(items)


def _rank(group: Group) -> float:
    return -group.recall_at_1.mean if group.recall_at_1.count else 1.0
