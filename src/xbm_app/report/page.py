"""The page: sections in order inside a shell that brings its own style and fetches nothing."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from xbm.errors import InputError
from xbm_app.report import curves, galleries, summary, tables
from xbm_app.report.groups import Comparison, Group, compare, group_runs
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.pictures import Encoder, symbols
from xbm_app.report.verdict import left_out, reductions
from xbm_app.report.view import RunView

LIMIT = 3_000_000  # bytes
ENCODERS = (Encoder(96, 80), Encoder(72, 70), Encoder(56, 60), Encoder(40, 50))


def write_report(runs: Sequence[RunView], out: Path, title: str) -> Path:
    """Writes the report of some runs as one HTML file that needs nothing else, and returns its path.

    Seeds of one group are averaged, groups of one loss with and without memory are compared; a single run is shown alone.
    Pictures are made smaller until the page stays under three megabytes.

    Example:
        >>> import tempfile
        >>> run = RunView("a", "contrastive, with memory", "contrastive", memory=True, seed=0, recall={"recall@1": 0.7})
        >>> write_report([run], Path(tempfile.mkdtemp()) / "report.html", "A run").name
        'report.html'
    """
    out = Path(out)
    if out.is_dir():
        raise InputError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    groups = group_runs(runs)
    comparisons = compare(groups)
    for encode in ENCODERS:
        page = render(title, groups, comparisons, encode).encode(errors="replace")  # names of files may not be text
        if len(page) < LIMIT:
            break
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{out.name}.part")
    beside.write_bytes(page)
    beside.replace(out)
    return out


def render(title: str, groups: Sequence[Group], comparisons: Sequence[Comparison], encode: Encoder) -> str:
    """The whole page as text."""
    sections = [
        (name, heading, body)
        for name, heading, body in (
            ("results", "Results", _results(groups, comparisons)),
            ("notes", "What the runs said about themselves", summary.notes(groups)),
            ("recall", "Recall at K", curves.recall_curves(groups)),
            ("seeds", "R@1 by seed", curves.by_seed(groups)),
            ("training", "While training", _joined(curves.loss_curves(groups), curves.evaluations(groups))),
            ("negatives", "Where the negatives come from", curves.negatives(groups)),
            ("drift", "How far embeddings drift", curves.drift(groups)),
            ("retrieval", "What is retrieved", _explained(RETRIEVAL, galleries.retrieval(groups, comparisons, encode))),
            ("mining", "What the memory mines", _explained(MINING, galleries.mining(groups, comparisons, encode))),
            ("labels", "Labels in doubt", _explained(DOUBTS, galleries.doubts(groups, encode))),
            ("cost", "What the memory costs" if comparisons else "Time", _cost(groups, comparisons)),
            ("reproduce", "How to reproduce", tables.reproduce(groups)),
        )
        if body
    ]
    return shell(
        title,
        symbols(),
        tag(
            "main",
            summary.header(title, groups, comparisons),
            tag("nav", *(tag("a", name.capitalize(), href=f"#{name}") for name, _, _ in sections), aria_label="Sections"),
            *(tag("section", tag("h2", heading), inner, id=name) for name, heading, inner in sections),
        ),
        script=_own("readout.js"),
    )


def shell(title: str, *content: Html, script: str = "") -> str:
    """A page around some content: style and script inside, nothing fetched."""
    body = tag("body", *content, tag("script", Html(script)) if script else None)
    return f"<!doctype html>\n{tag('html', _head(title, script), body, lang='en')}\n"


RETRIEVAL = join(
    [
        tag(
            "span",
            tag("svg", tag("use", href="#check"), viewBox="0 0 12 12", class_="mark", aria_hidden="true"),
            class_="sign right",
        ),
        " the query’s class, ",
        tag(
            "span",
            tag("svg", tag("use", href="#cross"), viewBox="0 0 12 12", class_="mark", aria_hidden="true"),
            class_="sign wrong",
        ),
        " another class. Nearest first; the number is the similarity.",
    ]
)
MINING = Html("Valid negatives of some anchors, most similar first; the number is the similarity (the paper’s Figure 5).")

DOUBTS = Html(
    "Training images that are more like another class than like their own, the most doubtful first; the run’s "
    "<code>doubted.csv</code> lists all of them. Beside each what is most like it in either class. They were not trained on "
    "their labels while these were in doubt."
)


def _results(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html:
    passages = [
        tag("aside", tag("h3", heading), *(tag("p", paragraph) for paragraph in paragraphs))
        for heading, paragraphs in reductions(groups)
    ]
    caveats = [tag("p", sentence, class_="caveat") for sentence in left_out(groups, comparisons)]
    return join([tables.results(groups), *caveats, *passages])


def _cost(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html | None:
    body = tables.cost(groups)
    told = tables.cost_sentence(comparisons)
    return _joined(tag("p", told) if told else None, body) if body else None


def _explained(words: Html, body: Html | None) -> Html | None:
    return join([tag("p", words, class_="explain"), body]) if body else None


def _joined(*parts: Html | None) -> Html | None:
    return join(parts) if any(parts) else None


def _head(title: str, script: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser itself holds the page to its promise: pictures inside it, its own style and script, nothing fetched.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_own("style.css"))),
    )


@cache
def _own(name: str) -> str:
    return files("xbm_app.report").joinpath(name).read_text(encoding="utf-8")
