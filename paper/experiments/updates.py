"""How the memory is updated (S-Tables 1, 2 and 6), the presets (S-Table 7), the supplementary's two tricks, the recipe `paper`
against what it takes differently from the paper, and the recipe `official`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paper import published
from paper.experiment import OFF, Arm, Experiment, Setting, base, contrastive, queue
from paper.experiments.losses import choices, columns_of, recall_cells
from paper.experiments.tuning import letter_arm
from paper.page import Block, Claim, Table, plus_minus, printed
from paper.record import APART
from paper.statistics import Gain, between, equivalence_p, in_words, p_value, paired_gain, points
from paper.study import Spread, Study, paired
from xbm_app.report.writing import MISSING, listed
from xbm_app.train.config import flat
from xbm_app.train.presets import FULL_QUEUE, RECIPES, preset

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
        trends = [_trend_claim(study, symbol) for study in studies]
        return [table, *filter(None, trends), *(block for study in studies for block in choices(study))]

    return draw


def slopes(study: Study) -> dict[int, float]:
    """By seed: the slope of R@1 over the values of m or α, counted 0, 1, ... in ascending order; of seeds with all values."""
    spreads = [study.spread(arm) for arm in study.arms[1:]]
    seeds = set.intersection(*(set(spread.by_seed) for spread in spreads))
    centre = (len(spreads) - 1) / 2
    spread_of_x = sum((x - centre) ** 2 for x in range(len(spreads)))
    return {
        seed: sum((x - centre) * spread.by_seed[seed] for x, spread in enumerate(spreads)) / spread_of_x
        for seed in sorted(seeds)
    }


def trend(study: Study) -> tuple[Gain | None, list[str]]:
    """One test for both small data sets: the mean slope over all seeds on Cars and CUB, and which of them have run."""
    by_data = {data: slopes(replace(study, setting=replace(study.setting, data=data))) for data in ("cars", "cub")}
    pooled = [slope for each in by_data.values() for slope in each.values()]
    numbered = dict(enumerate(pooled))
    return paired_gain(dict.fromkeys(numbered, 0.0), numbered), [data for data, each in by_data.items() if each]


def _trend_claim(study: Study, symbol: str) -> Claim:
    gain, data = trend(study)
    if gain is None or study.setting.data != data[0]:  # said once for both
        return Claim()
    way = {1: "rises", -1: "falls", 0: "shows no clear trend"}[gain.sign]
    return Claim(
        f"{study.setting.trunk}: R@1 {way} with {symbol}: {in_words(gain).replace('points', 'points per value')}, "
        f"over the seeds on {listed(data)}."
    )


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


# ------------------------------------------------------------------ the recipes to the letter

FP32 = {"optim.precision": "fp32", "memory.dtype": "float32"}
MARGIN = 0.01  # within one point, nothing has changed


def precision_arms(setting: Setting) -> list[Arm]:
    """The recipe `paper` as it runs on a GPU, each arm followed by the same in full precision: no memory, that of Table 7, and
    a queue, which is bfloat16 there."""
    with_queue = letter_arm(setting, "contrastive", memory=True)
    queued = replace(with_queue, label="contrastive, queue", settings={**with_queue.settings, **FULL_QUEUE})
    usual = [letter_arm(setting, "contrastive", memory=False), with_queue, queued]
    return [each for arm in usual for each in (arm, changed(arm, "fp32", FP32))]


def exception_arms(setting: Setting) -> list[Arm]:
    """The recipe `paper`, and what it does not take from the paper: 1,000 iterations without memory, and a plus sign."""
    usual = letter_arm(setting, "contrastive", memory=True)
    ascending = {"memory.alpha": -usual.settings["memory.alpha"]}
    return [
        usual, changed(usual, "warm-up of 1,000 iterations", {"memory.start": 1000}),
        changed(usual, "rows ascend, as printed", ascending),
    ]  # fmt: skip


def changed(arm: Arm, name: str, settings: dict[str, Any]) -> Arm:
    return replace(arm, label=f"{arm.label}, {name}", settings={**arm.settings, **settings}, measures=())


def draw_changes(data: str, studies: Sequence[Study]) -> list[Block]:
    """Every changed arm against the arm whose label it extends: the difference, and whether it is equivalent to none."""
    rows, claims = list[list[str]](), list[Block]()
    for study in studies:
        arms = {arm.label: arm for arm in study.arms}
        for label, arm in arms.items():
            usual = next((each for each in arms if label.startswith(f"{each}, ")), None)
            if usual is None:
                continue
            one, other = study.spread(arms[usual]), study.spread(arm)
            gain = paired(one, other).gain
            tested = [MISSING] * 3
            if gain is not None:
                claims.append(Claim(f"{study.setting.where}, {label}: {in_words(gain)} from {usual}{_equivalence(gain)}."))
                p = p_value(equivalence_p(gain, MARGIN)).removeprefix("p ").removeprefix("= ") if gain.tested else MISSING
                tested = [points(gain.mean), between(gain.interval()) if gain.tested else MISSING, p]
            rows.append([f"{study.setting.trunk}, {label}", plus_minus(one), plus_minus(other), *tested])
    header = [f"{data}, R@1, %", "recipe `paper`", "changed", "difference", "95 % interval", "p, equivalence within ±1 point"]
    return [Table(header, rows), *claims] if rows else []


def _equivalence(gain: Gain) -> str:
    """Two one-sided tests; an interval that includes 0 alone would show nothing."""
    if not gain.tested:
        return ""
    if equivalence_p(gain, MARGIN) < 0.05:
        return ": equivalent within ±1 point"
    return ": different" if gain.sign else ": neither a difference nor equivalence within ±1 point is shown"


def official_arms(setting: Setting) -> list[Arm]:
    """The recipe `official`, without memory and with it. Its schedule looks at held-out classes, so nothing else is chosen."""
    settings = {**RECIPES["official"], "loss.name": "contrastive", "loss.reduction": "sum"}
    return [
        Arm("official, no memory", {**settings, **OFF}, choose=None, seeds=1),
        Arm("official", settings, choose=None, seeds=1),
    ]


def official_scores(study: Study, arm: Arm) -> Spread:
    """R@1 on the test classes, at the checkpoint of the best MAP@R on held-out classes."""
    runs = [run for run in study.finished(arm) if len(run.values["scores"]) > 1]
    return Spread({run.seed: run.score("recall@1", list(run.values["scores"])[1]) for run in runs})


def draw_official(data: str, studies: Sequence[Study]) -> list[Block]:
    rows, claims = list[list[str]](), list[Block]()
    for study in studies:
        scores = [official_scores(study, arm) for arm in study.arms]
        for arm, spread in zip(study.arms, scores):
            rates = [min(run.curve("lr")[1], default=0.0) for run in study.finished(arm)]
            lowest = MISSING if not rates else f"{min(rates):g}"
            rows.append([f"{study.setting.trunk}, {arm.label}", plus_minus(study.spread(arm)), plus_minus(spread), lowest])
        gain = paired(*scores).gain
        if gain is not None:
            claims.append(Claim(f"{study.setting.where}: as in the released code, the memory adds {in_words(gain)}."))
    note = (
        "20 % of the training classes are held out: the learning rate falls when R@1 on them stalls, and the checkpoint with "
        "the best MAP@R on them is scored on the test classes. The released code looks at the test list for both."
    )
    return [Table([f"{data}, R@1, %", "held-out classes", "test classes", "lowest lr"], rows), note, *claims] if rows else []


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
    Experiment(
        "fp32", "The recipe `paper` in full precision", "section 4.1", ("cars", "cub"), precision_arms, draw_changes,
        elsewhere=False,
    ),
    Experiment(
        "exceptions", "The recipe `paper` with the paper's warm-up and sign", "section 3.3; supplementary, section 2",
        ("cars", "cub"), exception_arms, draw_changes, elsewhere=False,
    ),
    Experiment(
        "official", "The recipe `official`", "released code", ("cars", "cub"), official_arms, draw_official, elsewhere=False,
    ),
)  # fmt: skip
