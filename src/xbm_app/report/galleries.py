"""The sections made of pictures: what is retrieved, what the memory mines, which labels are in doubt."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from xbm_app.report.groups import Comparison, Group
from xbm_app.report.markup import Html, join, tag
from xbm_app.report.pictures import Encoder, doubtful_row, mined_row, query_row
from xbm_app.report.view import Mined, RunView
from xbm_app.report.wording import named

T = TypeVar("T")

QUERIES, ANCHORS = 24, 12  # on the whole page
OPEN = 4  # rows of a gallery that are shown before one asks for more


def retrieval(groups: Sequence[Group], comparisons: Sequence[Comparison], encode: Encoder) -> Html | None:
    """The same queries without and with memory, side by side; without a comparison, those of one run."""
    galleries = [
        gallery for c in comparisons if (gallery := _side_by_side(c, encode, max(1, QUERIES // len(comparisons)))) is not None
    ]
    if not galleries:
        able = [run for group in sorted(groups, key=_rank) for run in group.runs if run.queries]
        galleries = [_alone(able[0], encode)] if able else []
    return join(galleries) if galleries else None


def mining(groups: Sequence[Group], comparisons: Sequence[Comparison], encode: Encoder) -> Html | None:
    """Anchors with their negatives from batch and memory, of one run a loss."""
    chosen = [c.with_memory for c in comparisons if any(run.mined for run in c.with_memory.runs)] or [
        group for group in groups if group.memory and any(run.mined for run in group.runs)
    ][:1]
    if not chosen:
        return None
    parts = []
    for group in chosen:
        run = next(run for run in group.runs if run.mined)
        shown = run.mined[: max(1, ANCHORS // len(chosen))]
        rows = [mined_row(mined, i, encode) for i, mined in enumerate(shown, start=1)]
        parts.append(_gallery(f"{group.label}, seed {run.seed}", rows, "anchors", _hardest(shown)))
    return join(parts)


def doubts(groups: Sequence[Group], encode: Encoder) -> Html | None:
    """Images whose labels are in doubt, of the best run that has some: other runs of the same data would show the same ones."""
    able = [(group, run) for group in sorted(groups, key=_rank) for run in group.runs if run.doubtful]
    if not able:
        return None
    group, run = able[0]
    rows = [doubtful_row(doubtful, encode) for doubtful in run.doubtful[:ANCHORS]]
    return _gallery(f"{group.label}, seed {run.seed}", rows, "images", "")


def _side_by_side(c: Comparison, encode: Encoder, most: int) -> Html | None:
    pair = _same_seed(c.without.runs, c.with_memory.runs)
    if pair is None:
        return None
    without, with_memory = ({query.key: query for query in run.queries} for run in pair)
    keys = _spread([key for key in without if key in with_memory], most)
    if not keys:
        return None
    rows = [
        query_row(without[key], [("without memory", without[key]), ("with memory", with_memory[key])], encode) for key in keys
    ]
    seeds = {run.seed for run in pair}
    heading = f"{named(c.loss)}, seed {seeds.pop()}" if len(seeds) == 1 else named(c.loss)
    return _gallery(heading, rows, "queries", pair[1].chosen)


def _alone(run: RunView, encode: Encoder) -> Html:
    shown = _spread(run.queries, QUERIES)
    rows = [query_row(query, [("nearest first", query)], encode) for query in shown]
    return _gallery(f"{run.group}, seed {run.seed}", rows, "queries", run.chosen)


def _gallery(heading: str, rows: Sequence[Html], what: str, told: str) -> Html:
    more = rows[OPEN:]
    return tag(
        "div",
        tag("h3", heading),
        tag("p", told) if told else None,
        tag("div", *rows[:OPEN], class_="rows"),
        tag("details", tag("summary", f"{len(more)} more {what}"), tag("div", *more, class_="rows")) if more else None,
        class_="gallery",
    )


def _hardest(shown: Sequence[Mined]) -> str:
    """How much harder the memory's negatives are than the batch's, over the anchors shown."""
    top = [
        [max(m.similarity for m in source) for mined in shown if (source := getattr(mined, name))]
        for name in ("batch", "memory")
    ]
    told = [
        f"{sum(values) / len(values):.2f} from the {name} ({len(values)} of {len(shown)} anchors have one)"
        for name, values in zip(("batch", "memory"), top)
        if values
    ]
    return f"Mean similarity of the hardest negative: {', '.join(told)}." if told else ""


def _same_seed(without: Iterable[RunView], with_memory: Iterable[RunView]) -> tuple[RunView, RunView] | None:
    pairs = [(a, b) for a in without for b in with_memory if a.queries and b.queries]
    return min(pairs, key=lambda pair: (pair[0].seed != pair[1].seed, pair[0].seed), default=None)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many, from all over the list: the front alone could be of one kind."""
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else list(items)


def _rank(group: Group) -> float:
    return -group.recall_at_1.mean if group.recall_at_1.count else 1.0
