"""Each loss without and with memory (Table 1, S-Table 3)."""

from collections.abc import Mapping, Sequence
from typing import Any

from paper import published
from paper.experiment import LOSSES, Arm, Experiment, Setting, loss_arms
from paper.experiments.tuning import LETTER, letter_arm
from paper.page import Block, Claim, Table, plus_minus, printed, printed_gain
from paper.published import KS, Row
from paper.record import identity
from paper.statistics import in_words
from paper.study import Choice, Spread, Study, paired
from xbm_app.report.writing import MISSING, listed, percent, seeds

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


EXPERIMENTS = (
    Experiment(
        "table-1", "Each loss without and with memory, large data sets", "Table 1", ("sop", "inshop", "vehicleid"),
        large_arms, draw_losses, elsewhere=False,
    ),
    Experiment(
        "s-table-3", "Each loss without and with memory, CUB and Cars", "supplementary, Table 3", ("cub", "cars"),
        loss_arms, draw_losses,
    ),
)  # fmt: skip
