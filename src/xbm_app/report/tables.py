"""The sections made of tables: results, cost, how to reproduce."""

import math
import re
from collections.abc import Mapping, Sequence

from xbm_app.report.groups import Comparison, Group, Stat
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.view import RunView
from xbm_app.report.wording import MISSING, duration, error, listed, named, percent


def table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]]) -> Html:
    """A table that scrolls inside its own box; rows are (heading, cells, class)."""
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", c) for c in cells), class_=kind or None)
        for first, cells, kind in rows
    ]
    return tag(
        "div",
        tag("table", tag("caption", tag("span", caption)), tag("thead", top), tag("tbody", *body)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def results(groups: Sequence[Group]) -> Html:
    """Every metric of every group, mean and standard error over seeds; the best R@1 of each loss stands out."""
    names = metric_names([run for group in groups for run in group.runs])
    best = {loss: _top([group for group in groups if group.loss == loss]) for loss in {group.loss for group in groups}}
    rows = []
    for group in groups:
        cells = [
            _seeds(group),
            *(_cell(group.metric(name)) for name in names),
            duration(group.stat(lambda run: run.seconds).mean),
        ]
        rows.append((group.label, cells, f"{_kind(group)} best" if group is best[group.loss] else _kind(group)))
    data = listed(list(dict.fromkeys(run.data for group in groups for run in group.runs if run.data)) or ["the test classes"])
    several = any(len(group.runs) > 1 for group in groups)
    caption = f"Percent on {data}" + ("; mean ± standard error over seeds." if several else ".") + " Time: training, per run."
    return table(caption, ["setting", "seeds", *(_title(name) for name in names), "time"], rows)


def cost(groups: Sequence[Group]) -> Html | None:
    """Time per iteration of every group."""
    timed = [group for group in groups if group.seconds_per_iteration.count]
    if not timed:
        return None
    rows = []
    for group in timed:
        iterations = listed(sorted({f"{run.iterations:,}" for run in group.runs}))
        stat = group.seconds_per_iteration
        spread = _small("" if math.isnan(stat.error) else f" ± {duration(stat.error)}")
        rows.append((group.label, [iterations, join([duration(stat.mean), spread])], _kind(group)))
    return table("Wall-clock time of training divided by iterations.", ["setting", "iterations", "per iteration"], rows)


def cost_sentence(comparisons: Sequence[Comparison]) -> str:
    """What the memory adds to an iteration, for each loss that was timed both ways."""
    told = []
    for c in comparisons:
        a, b = c.without.seconds_per_iteration.mean, c.with_memory.seconds_per_iteration.mean
        if a > 0 and b > 0:
            change = f"{100 * (b / a - 1):+.0f}\u00a0%".replace("-", "−")
            told.append(f"{duration(b)} with memory and {duration(a)} without for {named(c.loss)} ({change})")
    if not told:
        return ""
    return f"An iteration takes {'; '.join(told)}. At search time the memory is gone and costs nothing."


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
        rows = [(group.label, [_settings(group, key) for key in differing], _kind(group)) for group in groups]
        parts += [
            tag("h3", "Settings that differ"),
            table("Where seeds differ, their values in turn.", ["setting", *differing], rows),
        ]
    versions = {key: value for run in runs for key, value in run.versions.items()}
    if versions:
        parts += [tag("h3", "Versions"), _pairs(versions)]
    return join(parts)


def metric_names(runs: Sequence[RunView]) -> list[str]:
    """Names of all metrics: recall by rising K, then the rest as they come."""
    names = dict.fromkeys(name for run in runs for name in run.recall)
    return sorted(names, key=lambda name: (0, int(m[1])) if (m := re.fullmatch(r"recall@(\d+)", name)) else (1, 0))


def _settings(group: Group, key: str) -> str:
    return ", ".join(dict.fromkeys(str(run.config.get(key, MISSING)) for run in group.runs))


def _kind(group: Group) -> str:
    return "with" if group.memory else "without"


def _pairs(pairs: Mapping[str, str]) -> Html:
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", str(value))) for key, value in pairs.items()), class_="pairs")


def _cell(stat: Stat) -> Html:
    return join([percent(stat.mean), _small("" if math.isnan(stat.error) else f" ± {error(stat)}")])


def _small(text: str) -> Html | None:
    return tag("small", text) if text else None


def _seeds(group: Group) -> str:
    able = group.recall_at_1.count
    return str(able) if able == len(group.runs) else f"{able} of {len(group.runs)}"


def _top(groups: Sequence[Group]) -> Group | None:
    able = [group for group in groups if group.recall_at_1.count]
    return max(able, key=lambda group: group.recall_at_1.mean) if len(able) > 1 else None


def _title(name: str) -> str:
    if name == "r_precision":
        return "R-precision"
    return f"R@{name.removeprefix('recall@')}" if name.startswith("recall@") else name.upper()
