"""Comparisons with other work: as printed (Tables 3–5, S-Tables 4 and 5), and other losses trained here with the same budget.

What is not tuned was fixed before the first of these runs. Proxies learn at 100 times the rate of the head, the factor in the
published code of Proxy-Anchor and SoftTriple. Options of a loss are the defaults of pytorch-metric-learning. "margin" weighs
all pairs: its distance-weighted sampling is not implemented. "momentum encoder" is the queue with rows from a slow copy of the
model (m = 0.999), as in MoCo; its control is the queue without.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paper import published
from paper.experiment import OFF, SUMMED, Arm, Experiment, Setting, contrastive
from paper.experiments.losses import columns_of, recall_cells
from paper.experiments.tuning import LETTER, TUNED, TunedChoice, letter_arm, tune, tuned_arm
from paper.page import Block, Claim, Table, printed
from paper.published import Row
from paper.statistics import between, p_value, paired_gain, points
from paper.study import Study
from xbm_app.report.writing import MISSING, listed, percent
from xbm_app.train.presets import FULL_QUEUE

COMPARED: dict[str, tuple[tuple[str, str, Row], ...]] = {
    "sop": published.TABLE_3,
    "inshop": published.TABLE_4,
    "vehicleid": published.TABLE_5,
    "cub": tuple((name, trunk, cub) for name, trunk, cub, _ in published.S_TABLE_4),
    "cars": tuple((name, trunk, cars) for name, trunk, _, cars in published.S_TABLE_4),
    "deepfashion2": published.S_TABLE_5,
}


def compared_arms(setting: Setting) -> list[Arm]:
    """Ours, and the recipe `paper`."""
    return [contrastive(setting)[1], letter_arm(setting, "contrastive", memory=True)]


def draw_comparison(data: str, studies: Sequence[Study]) -> list[Block]:
    """The paper's rows as printed, followed by ours."""
    columns = columns_of(data)
    rows = [[name, trunk, *(printed(value) for value in values)] for name, trunk, values in COMPARED.get(data, ())]
    for study in studies:
        for arm, whose in zip(study.arms, ("**ours**", f"**the letter** ({LETTER})")):
            config = study.config(arm, 0)
            dim = "" if config is None else f", {config.model.dim}-d"
            name = arm.label.removesuffix(f", {LETTER}")
            rows.append([f"{whose}, {name}", f"{study.setting.trunk}{dim}", *recall_cells(study, arm, columns)])
    notes: list[Block] = [published.SOP_CONFLICT] if data == "sop" else []
    return [Table([f"{data}, %", "trunk", *(name for name, _, _ in columns)], rows), *notes]


def _comparison(name: str, subject: str, source: str, *data: str) -> Experiment:
    title = f"{subject}, compared with other work"
    return Experiment(name, title, source, data, compared_arms, draw_comparison, elsewhere=False)


# ------------------------------------------------------------------ other losses, trained here

PROXIES: dict[str, Any] = {**OFF, "loss.lr_factor": 100.0}
QUEUE: dict[str, Any] = {
    "loss.name": "contrastive", **SUMMED, **FULL_QUEUE, "memory.start": 0, "memory.fill": True, "memory.batch_weight": 0.0,
}  # fmt: skip
METHODS: dict[str, Mapping[str, Any]] = {
    "Proxy-Anchor": {"loss.name": "pml/ProxyAnchorLoss", **PROXIES},
    "NormSoftmax": {"loss.name": "pml/NormalizedSoftmaxLoss", **PROXIES},
    "SoftTriple": {"loss.name": "pml/SoftTripleLoss", **PROXIES},
    "ProxyNCA": {"loss.name": "pml/ProxyNCALoss", **PROXIES},
    "margin": {"loss.name": "margin", **SUMMED, **OFF},
    "contrastive, queue": QUEUE,
    "contrastive, queue, momentum encoder": {**QUEUE, "memory.keys": 0.999},
}
OURS = "contrastive w/ M"


def method_arms(setting: Setting) -> list[Arm]:
    """Contrastive and MS without memory, contrastive with the paper's memory (runs of S-Table 3), and the other methods."""
    shared = [
        tuned_arm(setting, loss, memory) for loss, memory in (("contrastive", True), ("contrastive", False), ("MS", False))
    ]
    others = [Arm(f"{name}, {TUNED}", settings, seeds=3, tune=tune) for name, settings in METHODS.items()]
    return [*shared[: 1 if setting.mini else None], *others[:: 3 if setting.mini else 1]]


def draw_methods(data: str, studies: Sequence[Study]) -> list[Block]:
    """A row per method, the best first, each with its difference from contrastive with memory; then where that stands."""
    blocks: list[Block] = []
    for study in studies:
        scores = {arm.label.removesuffix(f", {TUNED}"): (arm, study.spread(arm)) for arm in study.arms}
        finished = {name: spread for name, (_, spread) in scores.items() if spread}
        ours, rows = finished.get(OURS), list[list[str]]()
        signs: dict[int, list[str]] = {1: [], 0: [], -1: []}
        for name in sorted(finished, key=lambda name: -finished[name].mean):
            spread, choice = finished[name], study.choice(scores[name][0])
            gain = None if ours is None or name == OURS else paired_gain(ours.by_seed, spread.by_seed)
            tested = [MISSING] * 3
            if gain is not None:
                tested = [points(gain.mean), *(
                    [between(gain.interval()), p_value(gain.p).removeprefix("p ").removeprefix("= ")] if gain.tested
                    else [MISSING] * 2
                )]  # fmt: skip
                signs[gain.sign].append(name)
            how = f"{choice.picked:g}, {choice.length:,}" if isinstance(choice, TunedChoice) else MISSING
            deviation = f" ± {100 * spread.deviation:.1f}" if len(spread) > 1 else ""
            rows.append([name, f"{percent(spread.mean)}{deviation}", str(len(spread)), *tested, how])
        header = [
            f"R@1, %, {study.setting.trunk}", "mean ± sd", "seeds", "against contrastive w/ M", "95 % interval", "p",
            "rate and length",
        ]  # fmt: skip
        blocks.append(Table(header, rows))
        if ours is not None and len(finished) > 1:
            place = 1 + sum(spread.mean > ours.mean for spread in finished.values())
            ahead, behind, unclear = (listed(signs[sign]) if signs[sign] else "none" for sign in (-1, 1, 0))
            blocks.append(Claim(
                f"{study.setting.where}: by its mean, contrastive with the paper's memory is number {place} of {len(finished)} "
                f"methods tuned with the same budget. By 95 % intervals, it is ahead of {ahead}, behind {behind}, and not "
                f"clearly different from {unclear}."
            ))  # fmt: skip
    return blocks


EXPERIMENTS = (
    _comparison("table-3", "SOP", "Table 3", "sop"),
    _comparison("table-4", "In-shop", "Table 4", "inshop"),
    _comparison("table-5", "VehicleID", "Table 5", "vehicleid"),
    _comparison("s-table-4", "CUB and Cars", "supplementary, Table 4", "cub", "cars"),
    _comparison("s-table-5", "DeepFashion2", "supplementary, Table 5", "deepfashion2"),
    Experiment(
        "methods", "Other losses, trained here with the same budget", "Tables 3–5 and supplementary, Table 4, measured",
        ("cars", "cub"), method_arms, draw_methods, elsewhere=False,
    ),
)  # fmt: skip
