"""Experiments about losses: Table 1 and S-Table 3 (each loss without and with memory), and the comparisons with other work."""

import math
from collections.abc import Sequence

from paper import published
from paper.arms import contrastive, loss_arms
from paper.blocks import NONE, Block, Claim, Table, printed, seeds, spread
from paper.experiment import Arm, Experiment, Setting
from paper.published import KS, Row
from paper.record import identity
from paper.study import Choice, Spread, Study, paired

Columns = list[tuple[str, int, str | None]]  # heading, K, protocol


def columns_of(data: str) -> Columns:
    """The recalls that the paper's tables have for a data set."""
    if data == "vehicleid":
        return [(f"{size} R@{k}", k, f"{size} leave-one-out") for size in ("small", "medium", "large") for k in KS["vehicleid"]]
    return [(f"R@{k}", k, None) for k in KS.get(data, (1, 2, 4, 8))]


def paper_rows(data: str) -> dict[str, Row]:
    if data == "vehicleid":
        return published.TABLE_1_VEHICLEID
    return {**published.TABLE_1, **published.S_TABLE_3}.get(data, {})


def draw_losses(data: str, studies: Sequence[Study]) -> list[Block]:
    """One table of R@1 with gains, the paper's beside ours; one of all recalls a trunk; a sentence about each gain."""
    paper = paper_rows(data)
    blocks: list[Block] = [_summary(data, studies, paper)]
    for study in studies:
        blocks += [sentence for arm in study.arms if (sentence := _verdict(study, arm, paper))]
        blocks += [f"All recalls, {study.setting.label}:", _recalls(data, study)]
        blocks += choices(study)
    return blocks


def _summary(data: str, studies: Sequence[Study], paper: dict[str, Row]) -> Table:
    header = ["R@1, %"] + (["paper (GoogLeNet, 512-d)", "gain"] if paper else [])
    for study in studies:
        header += [f"{study.setting.trunk}", "gain from memory"]
    labels = list(dict.fromkeys([*paper, *(arm.label for study in studies for arm in study.arms)]))
    rows = []
    for label in labels:
        row = [label]
        if paper:
            own = paper.get(label)
            row += [printed(own[0]) if own else NONE, _paper_gain(label, paper)]
        for study in studies:
            arms = {arm.label: arm for arm in study.arms}
            found = study.spread(arms[label]) if label in arms else None
            row += [spread(found), spread(gain(study, label), sign=True)]
        rows.append(row)
    return Table(header, rows)


def _paper_gain(label: str, paper: dict[str, Row]) -> str:
    row, base = paper.get(label), paper.get(label.removesuffix(" w/ M"))
    if not label.endswith(" w/ M") or row is None or base is None or row[0] is None or base[0] is None:
        return NONE
    return f"{row[0] - base[0]:+.1f}"


def gain(study: Study, label: str) -> Spread | None:
    """What memory adds, seed by seed; None where either side is missing."""
    arms = {arm.label: arm for arm in study.arms}
    base = label.removesuffix(" w/ M")
    if base == label or base not in arms or label not in arms:
        return None
    one, other = study.spread(arms[base]), study.spread(arms[label])
    return None if one is None or other is None else paired(one, other)


def _verdict(study: Study, arm: Arm, paper: dict[str, Row]) -> Claim | None:
    found = gain(study, arm.label)
    if found is None or not len(found):
        return None
    loss = arm.label.removesuffix(" w/ M")
    told = f"{study.setting.where}, {loss}: the memory adds {spread(found, sign=True)} points"
    paper_gain = _paper_gain(arm.label, paper)
    beside = "" if paper_gain == NONE else f" (the paper, with GoogLeNet: {paper_gain})"
    if math.isnan(found.error):
        return Claim(f"{told}{beside}; one seed, so nothing is known of its error.")
    clear = "more" if abs(found.mean) > 2 * found.error else "not more"
    return Claim(f"{told}{beside}, {seeds(len(found))}; {clear} than two standard errors from 0.")


def _recalls(data: str, study: Study) -> Table:
    columns = columns_of(data)
    rows = []
    for arm in study.arms:
        cells = [spread(study.spread(arm, f"recall@{k}", protocol)) for _, k, protocol in columns]
        found = study.spread(arm)
        rows.append([arm.label, *cells, spread(study.spread(arm, "map@r")), str(len(found)) if found else NONE])
    return Table(["%", *(name for name, _, _ in columns), "MAP@R", "seeds"], rows)


def choices(study: Study) -> list[Block]:
    """Which learning rates were chosen, and by what: R@1 of every candidate on the held-out classes."""
    found: dict[str, Choice] = {}
    shared: dict[str, str] = {}  # by the runs it was chosen by: arms that share them share the row
    for arm in study.arms:
        choice = study.choice(arm)
        if choice is not None and choice.setting == "optim.lr":
            runs = str([identity(config) for config in study.choosing(arm)])
            found.setdefault(shared.setdefault(runs, arm.chosen_as or arm.label), choice)
    if not found:
        return []
    rates = next(iter(found.values())).tried
    rows = []
    for label, choice in found.items():
        cells = [f"**{100 * s:.1f}**" if r == choice.picked else f"{100 * s:.1f}" for r, s in zip(rates, choice.scores)]
        rows.append([label, *cells, "at the edge" if choice.at_edge else ""])
    table = Table(["R@1, %, held-out training classes", *(f"lr {rate:g}" for rate in rates), ""], rows)
    return ["Learning rates chosen on 20 % of the training classes, held out; one run each, as many for every row:", table]


# ------------------------------------------------------------------ comparisons with other work

COMPARED: dict[str, tuple[str, tuple[tuple[str, str, Row], ...]]] = {
    "sop": ("table-3", published.TABLE_3),
    "inshop": ("table-4", published.TABLE_4),
    "vehicleid": ("table-5", published.TABLE_5),
    "cub": ("s-table-4", tuple((name, trunk, cub) for name, trunk, cub, _ in published.S_TABLE_4)),
    "cars": ("s-table-4", tuple((name, trunk, cars) for name, trunk, _, cars in published.S_TABLE_4)),
    "deepfashion2": ("s-table-5", published.S_TABLE_5),
}


def _with_memory(setting: Setting) -> list[Arm]:
    return [contrastive(setting)[1]]


def draw_comparison(data: str, studies: Sequence[Study]) -> list[Block]:
    """The paper's rows as printed, and below them ours."""
    columns = columns_of(data)
    rows = [[name, trunk, *(printed(value) for value in values)] for name, trunk, values in COMPARED.get(data, ("", ()))[1]]
    for study in studies:
        (arm,) = _with_memory(study.setting)
        cells = [spread(study.spread(arm, f"recall@{k}", protocol)) for _, k, protocol in columns]
        config = study.config(arm, 0)
        dim = "" if config is None else f", {config.model.dim}-d"
        rows.append([f"**ours**, {arm.label}", f"{study.setting.trunk}{dim}", *cells])
    notes: list[Block] = [published.SOP_CONFLICT] if data == "sop" else []
    return [Table([f"{data}, %", "trunk", *(name for name, _, _ in columns)], rows), *notes]


EXPERIMENTS = (
    Experiment(
        "table-1", "Each loss without and with memory, large data sets", "Table 1", ("sop", "inshop", "vehicleid"),
        loss_arms, draw_losses, elsewhere=False,
    ),
    Experiment(
        "s-table-3", "Each loss without and with memory, CUB and Cars", "supplementary, Table 3", ("cub", "cars"),
        loss_arms, draw_losses,
    ),
    Experiment("table-3", "SOP, beside other work", "Table 3", ("sop",), _with_memory, draw_comparison, False),
    Experiment("table-4", "In-shop, beside other work", "Table 4", ("inshop",), _with_memory, draw_comparison, False),
    Experiment("table-5", "VehicleID, beside other work", "Table 5", ("vehicleid",), _with_memory, draw_comparison, False),
    Experiment(
        "s-table-4", "CUB and Cars, beside other work", "supplementary, Table 4", ("cub", "cars"), _with_memory,
        draw_comparison, False,
    ),
    Experiment(
        "s-table-5", "DeepFashion2, beside other work", "supplementary, Table 5", ("deepfashion2",), _with_memory,
        draw_comparison, False,
    ),
)  # fmt: skip
