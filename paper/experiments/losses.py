"""Each loss without and with memory (Table 1, S-Table 3). Comparisons with other work: as printed (Tables 3–5, S-Tables 4 and
5), and other losses trained here with the same budget.

What is not tuned of these other losses was fixed before the first of their runs. Proxies learn at 100 times the rate of the
head, the factor in the published code of Proxy-Anchor and SoftTriple. Options of a loss are the defaults of
pytorch-metric-learning. "margin" weighs all pairs: its distance-weighted sampling is not implemented. "momentum encoder" is the
queue with rows from a slow copy of the model (m = 0.999), as in MoCo; its control is the queue without.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paper import published
from paper.experiment import LOSSES, OFF, SUMMED, Arm, Experiment, Setting, contrastive, loss_arms
from paper.experiments.tuning import LETTER, TUNED, TunedChoice, letter_arm, tune, tuned_arm
from paper.page import Block, Claim, Table, plus_minus, printed, printed_gain
from paper.published import KS, Row
from paper.record import identity
from paper.statistics import between, in_words, p_value, paired_gain, points
from paper.study import Choice, Spread, Study, paired
from xbm_app.report.writing import MISSING, listed, percent, seeds
from xbm_app.train.presets import FULL_QUEUE

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


def large_arms(setting: Setting) -> list[Arm]:
    """Ours, then the letter of the paper: Algorithm 1 with Table 7, which the baselines are assumed to share."""
    return [*loss_arms(setting), *(letter_arm(setting, loss, memory) for loss in LOSSES for memory in (False, True))]


def draw_losses(data: str, studies: Sequence[Study]) -> list[Block]:
    """R@1 with gains, the paper's beside ours; then per trunk a sentence per gain, all recalls, and the learning rates."""
    paper = paper_rows(data)
    blocks: list[Block] = [_summary(studies, paper)]
    for study in studies:
        claims = [claim for arm in study.arms for claim in (_gain_claim(study, arm, paper), _overtrained_claim(study, arm))]
        blocks += [claim for claim in claims if claim]
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
    label = label.removesuffix(f", {LETTER}")
    base = without_memory(label)
    if base == label:
        return MISSING
    without, with_memory = (paper[row][0] if row in paper else None for row in (base, label))
    return printed_gain(without, with_memory)


def without_memory(label: str) -> str:
    """The label of the same row without memory."""
    return label.replace(" w/ M", "")


def gain(study: Study, label: str) -> Spread:
    """What the memory adds, seed by seed; empty if either side is missing."""
    arms = {arm.label: arm for arm in study.arms}
    base = without_memory(label)
    if base == label or base not in arms or label not in arms:
        return Spread()
    return paired(study.spread(arms[base]), study.spread(arms[label]))


def _gain_claim(study: Study, arm: Arm, paper: dict[str, Row]) -> Claim | None:
    tested = gain(study, arm.label).gain
    if tested is None:
        return None
    paper_gain = _paper_gain(arm.label, paper)
    beside = "" if paper_gain == MISSING else f"; the paper, with GoogLeNet: {paper_gain}"
    unclear = " The interval includes 0." if tested.tested and not tested.sign else ""
    loss = without_memory(arm.label)
    return Claim(f"{study.setting.where}, {loss}: the memory adds {in_words(tested)}{beside}.{unclear}")


def _overtrained_claim(study: Study, arm: Arm) -> Claim | None:
    """Says so where the baseline of an arm is beaten by the same loss with less training or with wrong labels."""
    arms = {each.label: each for each in study.arms}
    base = without_memory(arm.label)
    if base == arm.label or not gain(study, arm.label):
        return None
    scores, better = study.spread(arms[base]), better_without(study, arms[base])
    if not better:
        return None
    return Claim(
        f"{study.setting.where}, {base}: the baseline is over-trained. Without memory, R@1 is {percent(scores.mean)}; it is "
        f"{listed([f'{percent(other.mean)} {how} ({seeds(len(other))})' for how, other in better.items()])}. The gain above "
        "includes what a better schedule would give without a memory."
    )


def better_without(study: Study, arm: Arm) -> dict[str, Spread]:
    """The runs of an arm without memory that score higher although their labels are worse or their training is shorter,
    best first."""
    config = study.config(arm, 0)
    if config is None:
        return {}
    usual, better = identity(config), dict[str, Spread]()
    named = {"data.noise", "optim.iterations", "optim.decay_at", "batch.size"}
    kinds: dict[str, dict[str, Any]] = {}
    for record in study.records:
        other = record.config
        changed = {name for name in usual if other[name] != usual[name] and name != "seed"}
        shorter = other["optim.iterations"] < usual["optim.iterations"]
        if changed and changed <= named and (other["data.noise"] > usual["data.noise"] or shorter):
            kinds[str([other[name] for name in sorted(named)])] = other
    for other in kinds.values():
        scores = Spread({record.seed: record.score() for record in study.records.seeds(other)})
        if scores.mean > study.spread(arm).mean:
            better[_how(other, usual)] = scores
    return dict(sorted(better.items(), key=lambda item: -item[1].mean))


def _how(config: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    parts = []
    if config["data.noise"] != usual["data.noise"]:
        parts.append(f"with {config['data.noise']:.0%} wrong labels".replace("%", " %"))
    if config["optim.iterations"] != usual["optim.iterations"]:
        parts.append(f"after {config['optim.iterations']:,} iterations")
    if config["batch.size"] != usual["batch.size"]:
        parts.append(f"with batches of {config['batch.size']}")
    return " ".join(parts)


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
    rates = sorted({rate for choice in chosen.values() for rate in choice.tried})  # some have rates beyond an edge
    rows = []
    for label, choice in chosen.items():
        cells = {rate: f"{100 * score:.1f}" for rate, score in zip(choice.tried, choice.scores)}
        cells[choice.picked] = f"**{cells[choice.picked]}**"
        rows.append([label, *(cells.get(rate, MISSING) for rate in rates), "at the edge" if choice.at_edge else ""])
    table = Table(["R@1, %, held-out training classes", *(f"lr {rate:g}" for rate in rates), ""], rows)
    return [
        "Learning rates, chosen on 20 % of the training classes, held out; one run each, equally many for every row:",
        table,
    ]


# ------------------------------------------------------------------ comparisons with other work, as printed

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
    Experiment(
        "table-1", "Each loss without and with memory, large data sets", "Table 1", ("sop", "inshop", "vehicleid"),
        large_arms, draw_losses, elsewhere=False,
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
    Experiment(
        "methods", "Other losses, trained here with the same budget", "Tables 3–5 and supplementary, Table 4, measured",
        ("cars", "cub"), method_arms, draw_methods, elsewhere=False,
    ),
)  # fmt: skip
