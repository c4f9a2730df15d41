"""The top of the page: title, verdict, the gains at a glance, and what the runs said about themselves."""

import math
from collections.abc import Sequence

from xbm_app.report.groups import Comparison, Group
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.verdict import verdict
from xbm_app.report.view import SEVERITIES
from xbm_app.report.wording import count, error, named, percent, seeds, signed


def header(title: str, groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Html:
    return tag(
        "header",
        tag("h1", title),
        tag("p", verdict(groups, comparisons).replace(" ± ", "\u00a0±\u00a0"), class_="verdict"),
        tag("div", *(_card(c) for c in comparisons), class_="cards") if comparisons else None,
        tag("p", _extent(groups), class_="extent"),
    )


def notes(groups: Sequence[Group]) -> Html | None:
    """What the runs said, gravest first; a sentence that several runs said is printed once, with their names."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            for severity, sentence in run.notes:
                said.setdefault((severity, sentence), {}).setdefault(group.label, []).append(str(run.seed))
    if not said:
        return None
    ordered = sorted(said.items(), key=lambda item: -SEVERITIES.index(item[0][0]))
    items = [
        tag(
            "li",
            tag("b", severity),
            tag("span", sentence, tag("small", "; ".join(_who(*one) for one in who.items()))),
            class_=severity,
        )
        for (severity, sentence), who in ordered
    ]
    return tag("ul", *items, class_="notes")


def _who(label: str, seeds: Sequence[str]) -> str:
    return f"{label}, seed{'s' if len(seeds) > 1 else ''} {', '.join(dict.fromkeys(seeds))}"


def _card(c: Comparison) -> Html:
    spread = "" if math.isnan(c.gain.error) else f" ± {error(c.gain)}"
    facts = [f"R@1 {percent(c.without.recall_at_1.mean)} → {percent(c.with_memory.recall_at_1.mean)}"]
    batch, memory = (c.with_memory.settled(f"valid_negatives_{source}") for source in ("batch", "memory"))
    if not math.isnan(batch) and not math.isnan(memory):
        facts.append(f"{count(batch)} + {count(memory)} valid negatives a step, batch + memory")
    a, b = c.without.seconds_per_iteration.mean, c.with_memory.seconds_per_iteration.mean
    if a > 0 and b > 0:
        facts.append(f"{100 * (b / a - 1):+.0f}\u00a0% time an iteration".replace("-", "−"))
    told = {"gain": "better with memory", "loss": "worse with memory", "same": "no clear difference", "single": "one seed only"}
    return tag(
        "div",
        tag("h2", named(c.loss)),
        tag("p", signed(c.gain.mean), tag("small", spread), tag("span", " points"), class_="points"),
        tag("p", told[c.outcome], class_="outcome"),
        tag("ul", *(tag("li", fact) for fact in facts)),
        class_=f"card {c.outcome}",
    )


def _extent(groups: Sequence[Group]) -> Html:
    runs = [run for group in groups for run in group.runs]
    parts = [f"{len(runs)} runs" if len(runs) > 1 else "1 run"]
    if len(runs) > 1:
        parts.append(seeds(len({run.seed for run in runs})))
    lengths = {run.iterations for run in runs}
    if len(lengths) == 1 and (length := lengths.pop()):
        parts.append(f"{length:,} iterations each" if len(runs) > 1 else f"{length:,} iterations")
    data = list(dict.fromkeys(run.data for run in runs if run.data))
    return join([" · ".join(parts + data)])
