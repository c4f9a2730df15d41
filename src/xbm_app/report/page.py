"""The report as one HTML page: its headline and sections in order, the sections that are tables, and the remarks on results.

Every sentence depends on the numbers that it quotes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from xbm.errors import InputError
from xbm_app.files import write_bytes
from xbm_app.report import curves, galleries
from xbm_app.report.groups import SEVERITIES, Comparison, Group, RunView, compare, difference, group_runs
from xbm_app.report.writing import (
    MISSING,
    Html,
    change,
    count,
    duration,
    error_bar,
    join,
    listed,
    loss_name,
    percent,
    plus_minus,
    seeds,
    shell,
    signed,
    tag,
)
from xbm_app.train.metrics import metric_title

LIMIT = 3_000_000  # bytes
ENCODERS = tuple(galleries.Encoder(side, quality) for side, quality in ((96, 80), (72, 70), (56, 60), (40, 50)))
COLLAPSE = 0.5  # below this share of the R@1 without memory, R@1 "collapses"
OUTCOMES = {"gain": "better with memory", "loss": "worse with memory", "same": "no clear difference", "single": "one seed only"}
LEVEL = {
    "balanced": ("With the balanced reduction, whose negatives never outweigh the positives,", "balanced reduction"),
    "mean": ("With the mean", "mean"),
}


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


# ------------------------------------------------------------------ the headline, and the runs' own warnings


def header(title: str, groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html:
    return tag(
        "header",
        tag("h1", title),
        tag("p", headline(groups, comparisons).replace(" ± ", "\u00a0±\u00a0"), class_="verdict"),
        tag("div", *(_card(c) for c in comparisons), class_="cards") if comparisons else None,
        tag("p", _extent(groups), class_="extent"),
    )


def headline(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> str:
    """One sentence: what the memory did to R@1, or what was reached if there is no comparison."""
    if not comparisons:
        return _reached(groups)
    clauses = []
    for outcome, verb in (("gain", "raises"), ("single", "changes"), ("loss", "lowers")):
        changes = [
            f"from {_recall(c.without)} to {_recall(c.with_memory)} for {loss_name(c.loss)} ({_gain(c)})"
            for c in comparisons
            if c.outcome == outcome
        ]
        if changes:
            clauses.append(f"{verb} R@1 {listed(changes)}")
    same = [
        f"for {loss_name(c.loss)} ({_recall(c.without)} without, {_recall(c.with_memory)} with: {_gain(c)})"
        for c in comparisons
        if c.outcome == "same"
    ]
    if same:
        clauses.append(f"makes no clear difference to R@1 {listed(same)}")
    return f"The memory {'; it '.join(clauses)}."


def _recall(group: Group) -> str:
    return percent(group.recall_at_1.mean)


def _gain(c: Comparison) -> str:
    tail = "one seed, so no error bar" if c.outcome == "single" else seeds(c.gain.count)
    return f"{plus_minus(c.gain, sign=True)}, {tail}"


def _reached(groups: Sequence[Group]) -> str:
    finished = [group for group in groups if group.recall_at_1.count]
    if not finished:
        return "No run has a result yet."
    top = max(finished, key=lambda group: group.recall_at_1.mean)
    stat = top.recall_at_1
    if len(groups) > 1:
        return f"The best of {len(groups)} settings is {top.label}, with R@1 {plus_minus(stat)} ({seeds(stat.count)})."
    after = f" after {top.runs[0].iterations:,} iterations" if top.runs[0].iterations else ""
    return f"R@1 is {plus_minus(stat)}{after}: {top.label}, {seeds(stat.count)}."


def _card(c: Comparison) -> Html:
    facts = [f"R@1 {_recall(c.without)} → {_recall(c.with_memory)}"]
    batch, memory = (c.with_memory.settled(f"valid_negatives_{source}") for source in ("batch", "memory"))
    if not math.isnan(batch) and not math.isnan(memory):
        facts.append(f"{count(batch)} + {count(memory)} valid negatives per step, batch + memory")
    a, b = c.without.seconds_per_iteration.mean, c.with_memory.seconds_per_iteration.mean
    if a > 0 and b > 0:
        facts.append(f"{change(a, b)} time per iteration")
    return tag(
        "div",
        tag("h2", loss_name(c.loss)),
        tag("p", signed(c.gain.mean), tag("small", error_bar(c.gain)), tag("span", " points"), class_="points"),
        tag("p", OUTCOMES[c.outcome], class_="outcome"),
        tag("ul", *(tag("li", fact) for fact in facts)),
        class_=f"card {c.outcome}",
    )


def _extent(groups: Sequence[Group]) -> Html:
    """How many runs, seeds and iterations, and on which data."""
    runs = [run for group in groups for run in group.runs]
    parts = [f"{len(runs)} runs" if len(runs) > 1 else "1 run"]
    if len(runs) > 1:
        parts.append(seeds(len({run.seed for run in runs})))
    lengths = {run.iterations for run in runs}
    if len(lengths) == 1 and (length := lengths.pop()):
        parts.append(f"{length:,} iterations each" if len(runs) > 1 else f"{length:,} iterations")
    data = list(dict.fromkeys(run.data for run in runs if run.data))
    return join([" · ".join(parts + data)])


def notes(groups: Sequence[Group]) -> Html | None:
    """The runs' own warnings, most severe first; one that several runs share is shown once, with their names."""
    by_note: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            for severity, sentence in run.notes:
                by_note.setdefault((severity, sentence), {}).setdefault(group.label, []).append(str(run.seed))
    if not by_note:
        return None
    items = []
    for (severity, sentence), runs in sorted(by_note.items(), key=lambda item: -SEVERITIES.index(item[0][0])):
        names = [f"{label}, {'seeds' if len(s) > 1 else 'seed'} {', '.join(dict.fromkeys(s))}" for label, s in runs.items()]
        items.append(tag("li", tag("b", severity), tag("span", sentence, tag("small", "; ".join(names))), class_=severity))
    return tag("ul", *items, class_="notes")


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


# ------------------------------------------------------------------ beside the table of results


def left_out(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    """Names each setting without memory that beats the one compared with, but has too few seeds."""
    return [
        f"Not compared, because {seeds(group.recall_at_1.count)} gives no standard error: {group.label}, "
        f"R@1 {percent(group.recall_at_1.mean)}."
        for c in comparisons
        for group in groups
        if group.loss == c.loss and not group.memory and group.recall_at_1.mean > c.without.recall_at_1.mean
    ]


def reductions(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) for each loss that falls below its baseline when summed with memory, but not when averaged."""
    passages = []
    for loss in dict.fromkeys(group.loss for group in groups):
        of_loss = {(g.reduction, g.memory): g for g in groups if g.loss == loss and g.recall_at_1.count}
        summed, level = of_loss.get(("sum", True)), of_loss.get(("balanced", True)) or of_loss.get(("mean", True))
        base = of_loss.get(("sum", False)) or of_loss.get(("mean", False))
        if summed and level and base and _falls(base, summed) and not _falls(of_loss.get(("mean", False)) or base, level):
            passages.append(_why(loss, base, summed, level))
    return passages


def _falls(base: Group, group: Group) -> bool:
    gain = difference(base, group)
    noise = 0.0 if math.isnan(gain.error) else gain.half_width
    return gain.mean < -max(noise, 0.02)


def _why(loss: str, base: Group, summed: Group, level: Group) -> tuple[str, list[str]]:
    collapsed = summed.recall_at_1.mean < COLLAPSE * base.recall_at_1.mean
    verb = "collapses" if collapsed else "falls"
    how, short = LEVEL[level.reduction]
    observation = (
        f"With the sum over pairs, {loss_name(loss)} {verb} when a memory is used: R@1 {plus_minus(summed.recall_at_1)}, and "
        f"{plus_minus(base.recall_at_1)} without memory. {how} it reaches {plus_minus(level.recall_at_1)} with the same memory."
    )
    return f"Why the sum {verb} and the {short} does not ({loss_name(loss)})", [observation, _cause(summed)]


def _cause(summed: Group) -> str:
    batch, memory = summed.settled("valid_negatives_batch"), summed.settled("valid_negatives_memory")
    from_batch = "" if math.isnan(batch) else f" and {count(batch)} from its batch"
    if not math.isnan(memory) and memory < 10 * max(1.0, 0.0 if math.isnan(batch) else batch):
        return (
            f"The usual cause, thousands of negatives, is not visible here: late in training a step had {count(memory)} valid "
            f"negatives from the memory{from_batch}. See the loss curves and the notes from the runs."
        )
    if math.isnan(memory):
        many = "With the sum, each valid negative from the memory counts as much as one from the batch"
    else:
        many = f"With the sum, a step late in training had {count(memory)} valid negatives from the memory{from_batch}"
    return (
        f"{many}, but only a few positives per anchor. In the sum, so many negatives outweigh so few positives, and nothing "
        "pulls the images of a class together any more. If classes are large and a pretrained model separates most images from "
        "the start, both sides are about equal and the sum does no harm: this explanation is about these runs."
    )
