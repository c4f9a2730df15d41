"""Experiments about how the memory is kept and trained with: S-Tables 1, 2, 6 and 7, and the supplementary's two tricks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paper import published
from paper.arms import contrastive, queue
from paper.blocks import NONE, Block, Table, printed, spread
from paper.experiment import OFF, Arm, Experiment, Setting, base
from paper.losses import choices, columns_of
from paper.record import APART
from paper.study import Study
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
    kept = {**CONTRASTIVE, "memory.update": "moving_average"}
    arms = [Arm(f"m = {m:g}", {**kept, "memory.momentum": m}, {"memory.momentum": 0.9}, "m = 0.9") for m in published.MOMENTA]
    return [_plain_queue(setting), *arms]


def alpha_arms(setting: Setting) -> list[Arm]:
    kept = {**CONTRASTIVE, "memory.update": "backprop", "memory.momentum": 0.0}
    arms = [Arm(f"α = {a:g}", {**kept, "memory.alpha": a}, {"memory.alpha": 0.1}, "α = 0.1") for a in published.ALPHAS]
    return [_plain_queue(setting), *arms]


def faster_arms(setting: Setting) -> list[Arm]:
    settings = queue(setting).settings
    return [
        Arm(f"update ×{n}", {**settings, "memory.updates_per_step": n}, {"memory.updates_per_step": 1}, measures=measures)
        for n, measures in ((1, queue(setting).measures), (10, ()))
    ]


def preset_arms(setting: Setting) -> list[Arm]:
    """The data set's preset by the recipe `paper`: to the letter, with Table 7's values."""
    wanted, usual = flat(preset(setting.data, trunk=setting.trunk)), flat(base(setting))
    changed = {name: wanted[name] for name in wanted if wanted[name] != usual[name] and name not in APART}
    kept = {name: value for name, value in changed.items() if name not in ("model.weights", "log.every")}
    without = Arm("preset, no memory", {**kept, "memory.update": "queue", "memory.momentum": None, **OFF}, choose=None)
    return [without, Arm("preset", kept, choose=None)]


def trick_arms(setting: Setting) -> list[Arm]:
    arms = []
    for arm in contrastive(setting):
        for name, changes in TRICKS.items():
            label = arm.label if name == "plain" else f"{arm.label}, {name}"
            measures = arm.measures if name == "plain" else ()
            arms.append(Arm(label, {**arm.settings, **changes}, arm.choose, measures=measures))
    return arms


def draw_row(paper: dict[str, published.Row], symbol: str):  # type: ignore[no-untyped-def]
    """Draws a table whose columns are the arms: the paper's row, and one a trunk."""

    def draw(data: str, studies: Sequence[Study]) -> list[Block]:
        rows = [["paper (GoogLeNet)", NONE, *(printed(value) for value in paper[data])]] if data in paper else []
        for study in studies:
            rows.append([study.setting.trunk, *(spread(study.spread(arm)) for arm in study.arms)])
        labels = [f"{symbol} = {value:g}" for value in published.MOMENTA]
        found: list[Block] = [Table([f"{data}, R@1, %", "queue", *labels], rows)]
        return [*found, *(block for study in studies for block in choices(study))]

    return draw


def draw_faster(data: str, studies: Sequence[Study]) -> list[Block]:
    columns = columns_of(data)
    rows = []
    if data == "sop":
        rows = [[f"paper (GoogLeNet), ×{n}", *(printed(v) for v in values)] for n, values in published.S_TABLE_6.items()]
    for study in studies:
        for arm in study.arms:
            cells = [spread(study.spread(arm, f"recall@{k}", protocol)) for _, k, protocol in columns]
            rows.append([f"{study.setting.trunk}, {arm.label}", *cells])
    return [Table([f"{data}, %", *(name for name, _, _ in columns)], rows)]


def draw_presets(data: str, studies: Sequence[Study]) -> list[Block]:
    """The paper's values beside the preset's, and what the preset reaches."""
    blocks: list[Block] = []
    if data in published.S_TABLE_7:
        lr, decay, iterations, ratio, alpha, m = published.S_TABLE_7[data]
        ours = preset(data)
        keyed = ours.memory.update != "queue"
        rows = [
            ["paper", f"{lr:g}", str(decay or NONE), str(iterations), f"{ratio:g}" if ratio else NONE, f"{alpha:g}", f"{m:g}"],
            [
                f"`xbm train {data} --recipe paper`", f"{ours.optim.lr:g}",
                str(ours.optim.decay_at[0]) if ours.optim.decay_at else NONE,
                str(ours.optim.iterations), f"{ours.memory.ratio:g}", f"{ours.memory.alpha:g}" if keyed else "0",
                f"{ours.memory.momentum:g}" if ours.memory.momentum is not None else "0",
            ],
        ]  # fmt: skip
        blocks.append(Table([data, "lr", "× 0.1 at", "iterations", "R_M", "α", "m"], rows))
    rows = [
        [f"{study.setting.trunk}, {arm.label}", spread(study.spread(arm)), str(len(study.runs(arm)) or NONE)]
        for study in studies
        for arm in study.arms
    ]
    return [*blocks, Table([f"{data}, %", "R@1", "seeds"], rows)] if rows else blocks


def draw_tricks(data: str, studies: Sequence[Study]) -> list[Block]:
    header = ["R@1, %", *(study.setting.trunk for study in studies)]
    labels = [arm.label for arm in trick_arms(studies[0].setting)] if studies else []
    rows = []
    for k, label in enumerate(labels):
        rows.append([label, *(spread(study.spread(study.arms[k])) for study in studies)])
    said = "The paper says that either adds more than 2 points on CUB and Cars, and does nothing on large data sets."
    return [Table(header, rows), said, *(block for study in studies for block in choices(study))] if rows else []


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
