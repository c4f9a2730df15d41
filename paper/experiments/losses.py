"""Each loss without and with memory (Table 1, S-Table 3), and comparisons with other work (Tables 3–5, S-Tables 4 and 5)."""

import math
from collections.abc import Sequence

from paper import published
from paper.experiment import Arm, Experiment, Setting, contrastive, loss_arms
from paper.page import Block, Claim, Table, plus_minus, printed, printed_gain
from paper.published import KS, Row
from paper.record import identity
from paper.study import Choice, Spread, Study, paired
from xbm_app.report.statistics import MISSING, seeds

Columns = list[tuple[str, int, str | None]]  # heading, K, protocol


def columns_of(data: str) -> Columns:
    """The columns of the paper's tables for a data set."""
    if data == "vehicleid":
        return [(f"{size} R@{k}", k, f"{size} leave-one-out") for size in ("small", "medium", "large") for k in KS["vehicleid"]]
    return [(f"R@{k}", k, None) for k in KS.get(data, (1, 2, 4, 8))]


def paper_rows(data: str) -> dict[str, Row]:
    if data == "vehicleid":
        return published.TABLE_1_VEHICLEID
    return {**published.TABLE_1, **published.S_TABLE_3}.get(data, {})


def draw_losses(data: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 with gains, the paper's beside ours; then per trunk a sentence per gain, all recalls, and the learning rates."""
    paper = paper_rows(data)
    blocks: list[Block] = [_summary(studies, paper)]
    for study in studies:
        blocks += [claim for arm in study.arms if (claim := _gain_claim(study, arm, paper))]
        blocks += [f"All recalls, {study.setting.label}:", _recalls(data, study), *choices(study)]
    return blocks


def _summary(studies: Sequence[Study], paper: dict[str, Row]) -> Table:
    header = ["R@1, %"] + (["paper (GoogLeNet, 512-d)", "gain"] if paper else [])
    for study in studies:
        header += [study.setting.trunk, "gain from memory"]
    rows = []
    for label in dict.fromkeys([*paper, *(arm.label for study in studies for arm in study.arms)]):
        row = [label]
        if paper:
            row += [printed(paper[label][0]) if label in paper else MISSING, _paper_gain(label, paper)]
        for study in studies:
            arms = {arm.label: arm for arm in study.arms}
            scores = study.spread(arms[label]) if label in arms else Spread()
            row += [plus_minus(scores), plus_minus(gain(study, label), sign=True)]
        rows.append(row)
    return Table(header, rows)


def _paper_gain(label: str, paper: dict[str, Row]) -> str:
    base = label.removesuffix(" w/ M")
    if base == label:
        return MISSING
    without, with_memory = (paper[row][0] if row in paper else None for row in (base, label))
    return printed_gain(without, with_memory)


def gain(study: Study, label: str) -> Spread:
    """What the memory adds, seed by seed; empty if either side is missing."""
    arms = {arm.label: arm for arm in study.arms}
    base = label.removesuffix(" w/ M")
    if base == label or base not in arms or label not in arms:
        return Spread()
    return paired(study.spread(arms[base]), study.spread(arms[label]))


def _gain_claim(study: Study, arm: Arm, paper: dict[str, Row]) -> Claim | None:
    points = gain(study, arm.label)
    if not points:
        return None
    text = f"{study.setting.where}, {arm.label.removesuffix(' w/ M')}: the memory adds {plus_minus(points, sign=True)} points"
    paper_gain = _paper_gain(arm.label, paper)
    text += "" if paper_gain == MISSING else f" (the paper, with GoogLeNet: {paper_gain})"
    if math.isnan(points.error):
        return Claim(f"{text}; a single seed, so the error is unknown.")
    clear = "more" if abs(points.mean) > 2 * points.error else "not more"
    return Claim(f"{text}, {seeds(len(points))}; {clear} than two standard errors from 0.")


def recall_cells(study: Study, arm: Arm, columns: Columns) -> list[str]:
    """The recalls of an arm, one cell per column."""
    return [plus_minus(study.spread(arm, f"recall@{k}", protocol)) for _, k, protocol in columns]


def _recalls(data: str, study: Study) -> Table:
    columns = columns_of(data)
    rows = []
    for arm in study.arms:
        count = len(study.runs(arm))
        precision = plus_minus(study.spread(arm, "map@r"))
        rows.append([arm.label, *recall_cells(study, arm, columns), precision, str(count) if count else MISSING])
    return Table(["%", *(name for name, _, _ in columns), "MAP@R", "seeds"], rows)


def choices(study: Study) -> list[Block]:
    """The learning rates that were chosen, with R@1 of every candidate on the held-out classes."""
    chosen: dict[str, Choice] = {}
    labels: dict[str, str] = {}  # by the runs of the choice: arms that share these share the row
    for arm in study.arms:
        choice = study.choice(arm)
        if choice is not None and choice.setting == "optim.lr":
            runs = str([identity(config) for config in study.choosing(arm)])
            chosen.setdefault(labels.setdefault(runs, arm.chosen_as or arm.label), choice)
    if not chosen:
        return []
    rates = next(iter(chosen.values())).tried
    rows = []
    for label, choice in chosen.items():
        cells = [f"**{100 * s:.1f}**" if r == choice.picked else f"{100 * s:.1f}" for r, s in zip(rates, choice.scores)]
        rows.append([label, *cells, "at the edge" if choice.at_edge else ""])
    table = Table(["R@1, %, held-out training classes", *(f"lr {rate:g}" for rate in rates), ""], rows)
    return [
        "Learning rates, chosen on 20 % of the training classes, held out; one run each, equally many for every row:",
        table,
    ]


# ------------------------------------------------------------------ comparisons with other work

COMPARED: dict[str, tuple[tuple[str, str, Row], ...]] = {
    "sop": published.TABLE_3,
    "inshop": published.TABLE_4,
    "vehicleid": published.TABLE_5,
    "cub": tuple((name, trunk, cub) for name, trunk, cub, _ in published.S_TABLE_4),
    "cars": tuple((name, trunk, cars) for name, trunk, _, cars in published.S_TABLE_4),
    "deepfashion2": published.S_TABLE_5,
}


def _with_memory(setting: Setting) -> list[Arm]:
    return [contrastive(setting)[1]]


def draw_comparison(data: str, studies: Sequence[Study]) -> list[Block]:
    """The paper's rows as printed, followed by ours."""
    columns = columns_of(data)
    rows = [[name, trunk, *(printed(value) for value in values)] for name, trunk, values in COMPARED.get(data, ())]
    for study in studies:
        (arm,) = _with_memory(study.setting)
        config = study.config(arm, 0)
        dim = "" if config is None else f", {config.model.dim}-d"
        rows.append([f"**ours**, {arm.label}", f"{study.setting.trunk}{dim}", *recall_cells(study, arm, columns)])
    notes: list[Block] = [published.SOP_CONFLICT] if data == "sop" else []
    return [Table([f"{data}, %", "trunk", *(name for name, _, _ in columns)], rows), *notes]


def _comparison(name: str, subject: str, source: str, *data: str) -> Experiment:
    title = f"{subject}, compared with other work"
    return Experiment(name, title, source, data, _with_memory, draw_comparison, elsewhere=False)


EXPERIMENTS = (
    Experiment(
        "table-1", "Each loss without and with memory, large data sets", "Table 1", ("sop", "inshop", "vehicleid"),
        loss_arms, draw_losses, elsewhere=False,
    ),
    Experiment(
        "s-table-3", "Each loss without and with memory, CUB and Cars", "supplementary, Table 3", ("cub", "cars"),
        loss_arms, draw_losses,
    ),
    _comparison("table-3", "SOP", "Table 3", "sop"),
    _comparison("table-4", "In-shop", "Table 4", "inshop"),
    _comparison("table-5", "VehicleID", "Table 5", "vehicleid"),
    _comparison("s-table-4", "CUB and Cars", "supplementary, Table 4", "cub", "cars"),
    _comparison("s-table-5", "DeepFashion2", "supplementary, Table 5", "deepfashion2"),
)  # fmt: skip
