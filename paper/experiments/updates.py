"""How the memory is updated (S-Tables 1, 2 and 6), the presets (S-Table 7), and the supplementary's two tricks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paper import published
from paper.experiment import OFF, Arm, Experiment, Setting, base, contrastive, queue
from paper.experiments.losses import choices, columns_of, recall_cells
from paper.page import Block, Table, plus_minus, printed
from paper.record import APART
from paper.study import Study
from xbm_app.report.statistics import MISSING
from xbm_app.train.config import flat
from xbm_app.train.presets import preset

CONTRASTIVE = {"loss.name": "contrastive", "memory.ratio": 1.0}
TRICKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen batch norm": {"model.freeze_batch_norm": True},
    "trunk at a tenth of the lr": {"model.trunk_lr": 0.1},
}


def _plain_queue(setting: Setting) -> Arm:
    return replace(queue(setting), label="queue")


def momentum_arms(setting: Setting) -> list[Arm]:
    update = {**CONTRASTIVE, "memory.update": "moving_average"}
    arms = [Arm(f"m = {m:g}", {**update, "memory.momentum": m}, {"memory.momentum": 0.9}, "m = 0.9") for m in published.MOMENTA]
    return [_plain_queue(setting), *arms]


def alpha_arms(setting: Setting) -> list[Arm]:
    update = {**CONTRASTIVE, "memory.update": "backprop", "memory.momentum": 0.0}
    arms = [Arm(f"α = {a:g}", {**update, "memory.alpha": a}, {"memory.alpha": 0.1}, "α = 0.1") for a in published.ALPHAS]
    return [_plain_queue(setting), *arms]


def faster_arms(setting: Setting) -> list[Arm]:
    settings = queue(setting).settings
    return [
        Arm(f"update ×{n}", {**settings, "memory.updates_per_step": n}, {"memory.updates_per_step": 1}, measures=measures)
        for n, measures in ((1, queue(setting).measures), (10, ()))
    ]


def preset_arms(setting: Setting) -> list[Arm]:
    """The data set's preset with the recipe `paper`, which has Table 7's values."""
    usual, same = flat(base(setting)), {*APART, "model.weights", "log.every"}
    values = flat(preset(setting.data, trunk=setting.trunk))
    changes = {name: value for name, value in values.items() if value != usual[name] and name not in same}
    without = Arm("preset, no memory", {**changes, "memory.update": "queue", "memory.momentum": None, **OFF}, choose=None)
    return [without, Arm("preset", changes, choose=None)]


def trick_arms(setting: Setting) -> list[Arm]:
    arms = []
    for arm in contrastive(setting):
        for name, changes in TRICKS.items():
            label = arm.label if name == "plain" else f"{arm.label}, {name}"
            measures = arm.measures if name == "plain" else ()
            arms.append(Arm(label, {**arm.settings, **changes}, arm.choose, measures=measures))
    return arms


def draw_row(paper: dict[str, published.Row], symbol: str) -> Callable[[str, Sequence[Study]], list[Block]]:
    """Returns a function that draws a table with one column per arm: the paper's row, and one per trunk."""

    def draw(data: str, studies: Sequence[Study]) -> list[Block]:
        rows = [["paper (GoogLeNet)", MISSING, *(printed(value) for value in paper[data])]] if data in paper else []
        for study in studies:
            rows.append([study.setting.trunk, *(plus_minus(study.spread(arm)) for arm in study.arms)])
        labels = [f"{symbol} = {value:g}" for value in published.MOMENTA]
        table = Table([f"{data}, R@1, %", "queue", *labels], rows)
        return [table, *(block for study in studies for block in choices(study))]

    return draw


def draw_faster(data: str, studies: Sequence[Study]) -> list[Block]:
    columns = columns_of(data)
    rows = []
    if data == "sop":
        rows = [[f"paper (GoogLeNet), ×{n}", *(printed(v) for v in values)] for n, values in published.S_TABLE_6.items()]
    for study in studies:
        rows += [[f"{study.setting.trunk}, {arm.label}", *recall_cells(study, arm, columns)] for arm in study.arms]
    return [Table([f"{data}, %", *(name for name, _, _ in columns)], rows)]


def draw_presets(data: str, studies: Sequence[Study]) -> list[Block]:
    """The paper's values and the preset's, and R@1 with the preset."""
    blocks: list[Block] = []
    if data in published.S_TABLE_7:
        lr, decay, iterations, ratio, alpha, m = published.S_TABLE_7[data]
        ours = preset(data)
        keyed = ours.memory.update != "queue"
        rows = [
            [
                "paper", f"{lr:g}", str(decay or MISSING), str(iterations), f"{ratio:g}" if ratio else MISSING, f"{alpha:g}",
                f"{m:g}",
            ],
            [
                f"`xbm train {data} --recipe paper`", f"{ours.optim.lr:g}",
                str(ours.optim.decay_at[0]) if ours.optim.decay_at else MISSING,
                str(ours.optim.iterations), f"{ours.memory.ratio:g}", f"{ours.memory.alpha:g}" if keyed else "0",
                f"{ours.memory.momentum:g}" if ours.memory.momentum is not None else "0",
            ],
        ]  # fmt: skip
        blocks.append(Table([data, "lr", "× 0.1 at", "iterations", "R_M", "α", "m"], rows))
    rows = [
        [f"{study.setting.trunk}, {arm.label}", plus_minus(study.spread(arm)), str(len(study.runs(arm)) or MISSING)]
        for study in studies
        for arm in study.arms
    ]
    return [*blocks, Table([f"{data}, %", "R@1", "seeds"], rows)] if rows else blocks


def by_trunk(corner: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 of every arm, one column per trunk."""
    labels = [arm.label for arm in studies[0].arms] if studies else []
    rows = [[label, *(plus_minus(study.spread(study.arms[k])) for study in studies)] for k, label in enumerate(labels)]
    return [Table([corner, *(study.setting.trunk for study in studies)], rows)] if rows else []


def draw_tricks(data: str, studies: Sequence[Study]) -> list[Block]:
    note = "According to the paper, each adds more than 2 points on CUB and Cars and nothing on large data sets."
    table = by_trunk("R@1, %", studies)
    return [*table, note, *(block for study in studies for block in choices(study))] if table else []


EXPERIMENTS = (
    Experiment(
        "s-table-1", "Moving average update", "supplementary, Table 1", tuple(published.S_TABLE_1), momentum_arms,
        draw_row(published.S_TABLE_1, "m"),
    ),
    Experiment(
        "s-table-2", "Back-propagation update", "supplementary, Table 2", tuple(published.S_TABLE_2), alpha_arms,
        draw_row(published.S_TABLE_2, "α"),
    ),
    Experiment(
        "s-table-6", "Ten batches enqueued per iteration", "supplementary, Table 6", ("sop",), faster_arms, draw_faster
    ),
    Experiment(
        "s-table-7", "Hyper-parameters: the presets", "supplementary, Table 7", tuple(published.S_TABLE_7), preset_arms,
        draw_presets,
    ),
    Experiment(
        "tricks", "Frozen batch norm, and a ten times smaller learning rate for the trunk", "supplementary, section 1",
        ("cub", "cars"), trick_arms, draw_tricks,
    ),
)  # fmt: skip
