"""The report as one HTML page: its sections in order, and the sections that are tables."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from xbm.errors import InputError
from xbm_app.files import write_bytes
from xbm_app.report import curves, galleries
from xbm_app.report.groups import Comparison, Group, RunView, compare, group_runs
from xbm_app.report.headline import header, left_out, notes, reductions
from xbm_app.report.markup import Html, join, shell, tag
from xbm_app.report.statistics import MISSING, change, duration, error_bar, listed, loss_name, percent
from xbm_app.train.metrics import metric_title

LIMIT = 3_000_000  # bytes
ENCODERS = tuple(galleries.Encoder(side, quality) for side, quality in ((96, 80), (72, 70), (56, 60), (40, 50)))


def write_report(runs: Sequence[RunView], out: Path, title: str) -> Path:
    """Writes the report of some runs as one self-contained HTML file, and returns its path.

    Seeds of one group are averaged, and groups of one loss with and without memory are compared; a single run is shown alone.
    Images are shrunk until the page is smaller than three megabytes.

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
        page = render(title, groups, comparisons, encode)
        if len(page) < LIMIT:
            break
    write_bytes(out, page)
    return out


def render(title: str, groups: Sequence[Group], comparisons: Sequence[Comparison], encode: galleries.Encoder) -> bytes:
    """The whole page; sections without content are left out."""
    sections = [
        (name, heading, body)
        for name, heading, body in (
            ("results", "Results", results(groups, comparisons)),
            ("notes", "Notes from the runs", notes(groups)),
            ("recall", "Recall at K", curves.recall_curves(groups)),
            ("seeds", "R@1 by seed", curves.by_seed(groups)),
            ("training", "During training", join([curves.loss_curves(groups), curves.evaluations(groups)])),
            ("negatives", "Where the negatives come from", curves.negatives(groups)),
            ("drift", "How far embeddings drift", curves.drift(groups)),
            ("retrieval", "What is retrieved", galleries.retrieval(groups, comparisons, encode)),
            ("mining", "What the memory mines", galleries.mining(groups, comparisons, encode)),
            ("labels", "Likely label errors", galleries.doubts(groups, encode)),
            ("cost", "What the memory costs" if comparisons else "Time", cost(groups, comparisons)),
            ("reproduce", "How to reproduce", reproduce(groups)),
        )
        if body
    ]
    main = tag(
        "main",
        header(title, groups, comparisons),
        tag("nav", *(tag("a", name.capitalize(), href=f"#{name}") for name, _, _ in sections), aria_label="Sections"),
        *(tag("section", tag("h2", heading), body, id=name) for name, heading, body in sections),
    )
    return shell(title, galleries.symbols(), main, script="readout.js")


# ------------------------------------------------------------------ the sections that are tables


def table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]]) -> Html:
    """A table that scrolls inside its own box; rows are (heading, cells, class)."""
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", c) for c in cells), class_=kind) for first, cells, kind in rows
    ]
    return tag(
        "div",
        tag("table", tag("caption", tag("span", caption)), tag("thead", top), tag("tbody", *body)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def results(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html:
    """Every metric of every group with its standard error, the best R@1 of each loss highlighted; and remarks on them."""
    names = metric_names([run for group in groups for run in group.runs])
    best = [_top([group for group in groups if group.loss == loss]) for loss in {group.loss for group in groups}]
    rows = []
    for group in groups:
        count, total = group.recall_at_1.count, len(group.runs)
        stats = [group.metric(name) for name in names]
        cells = [
            _plain(str(count) if count == total else f"{count} of {total}"),
            *(_cell(percent(stat.mean), error_bar(stat)) for stat in stats),
            _plain(duration(group.stat(lambda run: run.seconds).mean)),
        ]
        rows.append((group.label, cells, f"{group.side} best" if group in best else group.side))
    data = listed(list(dict.fromkeys(run.data for group in groups for run in group.runs if run.data)) or ["the test classes"])
    several = any(len(group.runs) > 1 for group in groups)
    caption = f"Percent on {data}" + ("; mean ± standard error over seeds." if several else ".") + " Time: training, per run."
    head = ["setting", "seeds", *(metric_title(name) for name in names), "time"]
    caveats = [tag("p", sentence, class_="caveat") for sentence in left_out(groups, comparisons)]
    passages = [
        tag("aside", tag("h3", heading), *(tag("p", p) for p in paragraphs)) for heading, paragraphs in reductions(groups)
    ]
    return join([table(caption, head, rows), *caveats, *passages])


def cost(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html | None:
    """Time per iteration of every group, and what the memory adds to it."""
    rows = []
    for group in groups:
        stat = group.seconds_per_iteration
        if stat.count:
            iterations = listed(sorted({f"{run.iterations:,}" for run in group.runs}))
            error = "" if math.isnan(stat.error) else f" ± {duration(stat.error)}"
            rows.append((group.label, [iterations, _cell(duration(stat.mean), error)], group.side))
    if not rows:
        return None
    times = []
    for c in comparisons:
        a, b = c.without.seconds_per_iteration.mean, c.with_memory.seconds_per_iteration.mean
        if a > 0 and b > 0:
            times.append(f"{duration(b)} with memory and {duration(a)} without for {loss_name(c.loss)} ({change(a, b)})")
    sentence = f"An iteration takes {'; '.join(times)}. At search time the memory is not used and costs nothing."
    head = ["setting", "iterations", "per iteration"]
    return join(
        [tag("p", sentence) if times else None, table("Wall-clock time of training divided by iterations.", head, rows)]
    )


def reproduce(groups: Sequence[Group]) -> Html:
    """Commands, settings that all runs share, settings that differ, versions."""
    runs = [run for group in groups for run in group.runs]
    parts: list[Html] = []
    commands = list(dict.fromkeys(run.command for run in runs if run.command))
    if commands:
        parts.append(tag("pre", tag("code", "\n".join(commands)), tabindex="0"))
    shared = {key: value for key, value in runs[0].config.items() if all(run.config.get(key) == value for run in runs)}
    if shared:
        parts += [tag("h3", "Settings" if len(runs) == 1 else "Settings that all runs share"), _pairs(shared)]
    differing = [key for key in dict.fromkeys(k for run in runs for k in run.config) if key not in shared]
    if differing:
        rows = [(group.label, [_settings(group, key) for key in differing], group.side) for group in groups]
        parts += [
            tag("h3", "Settings that differ"),
            table("Where seeds differ, the values of all seeds are listed.", ["setting", *differing], rows),
        ]
    versions = {key: value for run in runs for key, value in run.versions.items()}
    if versions:
        parts += [tag("h3", "Versions"), _pairs(versions)]
    return join(parts)


def metric_names(runs: Sequence[RunView]) -> list[str]:
    """Names of all metrics: recall by increasing K, then the others in their order."""
    names = dict.fromkeys(name for run in runs for name in run.recall)
    return sorted(names, key=lambda name: (0, int(m[1])) if (m := re.fullmatch(r"recall@(\d+)", name)) else (1, 0))


def _top(groups: Sequence[Group]) -> Group | None:
    finished = [group for group in groups if group.recall_at_1.count]
    return max(finished, key=lambda group: group.recall_at_1.mean) if len(finished) > 1 else None


def _settings(group: Group, key: str) -> str:
    return ", ".join(dict.fromkeys(str(run.config.get(key, MISSING)) for run in group.runs))


def _pairs(pairs: Mapping[str, str]) -> Html:
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", str(value))) for key, value in pairs.items()), class_="pairs")


def _plain(text: str) -> Html:
    """A cell that is not highlighted with its row, because it is not what makes the row the best."""
    return tag("span", text, class_="plain")


def _cell(mean: str, error: str) -> Html:
    return join([mean, tag("small", error) if error else None])
