"""S-Table 3, without and with memory: the gain of every loss with its tests, the paper's figures beside it, and what failed.

Declared before the first of these runs: the confirmatory tests are the six gains of the tuned rows with GoogLeNet (three losses
on Cars and on CUB), each a paired t test over the seeds that both arms have, with Holm's correction over all six. A gain that
was not run yet counts as p = 1. Everything else on the page is exploratory: the rows with Table 7's schedule, other trunks, and
comparisons of rows with each other.

The tests are paired because a seed fixes the head's initial weights, the order of the batches and the crops in both arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paper.experiment import Arm, Experiment
from paper.experiments.losses import paper_rows
from paper.experiments.tuning import LETTER, ORDER, TUNED, TunedChoice, label_of, tuned_arms
from paper.page import Block, Claim, Table, printed, printed_gain
from paper.published import Row
from paper.record import read_labels, unpacked
from paper.statistics import Gain, between, class_bootstrap, holm, in_words, p_value, paired_gain, points
from paper.study import Spread, Study
from xbm_app.data.benchmarks import BENCHMARKS
from xbm_app.report.writing import MISSING, listed, percent

NOT_YET = "not run yet"
TRUNK = "googlenet_bvlc"  # of the confirmatory tests: the network that the paper cites
DATA = ("cars", "cub")
FAMILY = tuple((data, loss) for data in DATA for loss in ORDER)
COLLAPSE = 0.6  # a memory collapses a loss if less than this share of its R@1 is left
AGAINST = {TUNED: "tuned against tuned", LETTER: "letter against letter"}


@dataclass(frozen=True)
class Comparison:
    """One loss without and with memory.

    Attributes:
        kind: TUNED or LETTER.
        one: R@1 without memory, by seed.
        other: with memory.
        redrawn: 95 % interval of the gain over test classes drawn anew; None without the hits or labels it needs.
        adjusted: Holm's p-value, if the gain is one of the six.
    """

    loss: str
    kind: str
    one: Spread
    other: Spread
    redrawn: tuple[float, float] | None = None
    adjusted: float | None = None

    @property
    def gain(self) -> Gain | None:
        return paired_gain(self.one.by_seed, self.other.by_seed)

    @property
    def verdict(self) -> int:
        """1: a gain, −1: a loss, 0: neither is shown. By Holm's p-value if the gain is one of the six, else by its interval."""
        gain = self.gain
        if gain is None or not gain.tested:
            return 0
        shown = gain.sign != 0 if self.adjusted is None else self.adjusted < 0.05
        return (1 if gain.mean > 0 else -1) if shown else 0

    @property
    def collapsed(self) -> bool:
        return bool(self.one and self.other) and self.other.mean < COLLAPSE * self.one.mean


def arm_of(study: Study, loss: str, memory: bool, kind: str) -> Arm | None:
    return next((arm for arm in study.arms if arm.label == label_of(loss, memory, kind)), None)


def compare(study: Study, loss: str, kind: str) -> Comparison:
    arms = [arm_of(study, loss, memory, kind) for memory in (False, True)]
    one, other = (Spread() if arm is None else study.spread(arm) for arm in arms)
    adjusted = adjusted_p(study).get((study.setting.data, loss)) if kind == TUNED else None
    return Comparison(loss, kind, one, other, redrawn(study, arms), adjusted)


def adjusted_p(study: Study) -> dict[tuple[str, str], float]:
    """Holm's p-values of those of the six gains that have run; empty for other trunks."""
    if study.setting.trunk != TRUNK or study.setting.data not in DATA:
        return {}
    values = {}
    for data, loss in FAMILY:
        there = replace(study, setting=replace(study.setting, data=data))
        one, other = (there.spread(arm) for memory in (False, True) if (arm := arm_of(there, loss, memory, TUNED)))
        gain = paired_gain(one.by_seed, other.by_seed)
        if gain is not None and gain.tested:
            values[data, loss] = gain.p
    return holm(values, len(FAMILY))


def redrawn(study: Study, arms: Sequence[Arm | None]) -> tuple[float, float] | None:
    """The gain's interval over test classes, from the hits of the seeds that both arms have."""
    hits = [
        {run.seed: unpacked(run.values["hits"]) for run in study.finished(arm) if run.values.get("hits")}
        for arm in arms
        if arm is not None
    ]
    shared = sorted(hits[0].keys() & hits[1].keys()) if len(hits) == 2 else []
    if not shared:
        return None
    labels = read_labels(study.records.folder, study.setting.data, len(hits[0][shared[0]]))
    if labels is None:
        return None
    one, other = (np.stack([each[seed] for seed in shared]) for each in hits)
    return class_bootstrap(one, other, labels)


# ------------------------------------------------------------------ drawing


def draw_tuned(data: str, studies: Sequence[Study]) -> list[Block]:
    """A table per trunk, the paper's GoogLeNet first; then a sentence per gain, and per choice that failed."""
    paper = paper_rows(data)
    ordered = sorted(studies, key=lambda study: study.setting.trunk != TRUNK)
    blocks: list[Block] = []
    if data in DATA and not (ordered and ordered[0].setting.trunk == TRUNK):
        rows = [_row(Comparison(loss, kind, Spread(), Spread()), None, paper) for kind in (TUNED, LETTER) for loss in ORDER]
        blocks.append(Table(_header(TRUNK), rows))
    for study in ordered:
        comparisons = [compare(study, loss, kind) for kind in (TUNED, LETTER) for loss in ORDER]
        if study.setting.trunk != TRUNK:
            comparisons = [each for each in comparisons if each.one or each.other]
        if comparisons:
            blocks.append(Table(_header(study.setting.trunk), [_row(each, study, paper) for each in comparisons]))
        blocks += [_images(study), _family(study)]
        sentences = [_sentence(study, each, paper) for each in comparisons if each.gain]
        sentences += [_failed_choice(study, loss, memory) for loss in ORDER for memory in (False, True)]
        blocks += [Claim(each) if study.setting.trunk == TRUNK else each for each in sentences if each]
        blocks += _choices(study)
    return [block for block in blocks if block]


def _header(trunk: str) -> list[str]:
    return [
        f"R@1, %, {trunk}", "no memory, mean ± sd", "memory, mean ± sd", "seeds", "gain", "95 % interval", "p", "p, Holm",
        "classes redrawn, 95 %", "rate and length, no memory", "rate and length, memory", "paper, no memory", "paper, memory",
        "paper, gain",
    ]  # fmt: skip


def _row(each: Comparison, study: Study | None, paper: dict[str, Row]) -> list[str]:
    printed_pair = [row[0] if (row := paper.get(name)) else None for name in (each.loss, f"{each.loss} w/ M")]
    gain, tested = each.gain, [MISSING] * 4
    if gain is not None and gain.tested:
        adjusted = MISSING if each.adjusted is None else p_value(each.adjusted).removeprefix("p ").removeprefix("= ")
        plain = p_value(gain.p).removeprefix("p ").removeprefix("= ")
        tested = [between(gain.interval()), plain, adjusted, MISSING if each.redrawn is None else between(each.redrawn)]
    settings = [_settings(study, each, memory) if study else MISSING for memory in (False, True)]
    return [
        f"{each.loss}, {each.kind}", _mean_and_deviation(each.one), _mean_and_deviation(each.other), _seeds(each),
        MISSING if gain is None else points(gain.mean), *tested, *settings, *(printed(value) for value in printed_pair),
        printed_gain(*printed_pair),
    ]  # fmt: skip


def _mean_and_deviation(scores: Spread) -> str:
    if not scores:
        return NOT_YET
    return percent(scores.mean) + (f" ± {100 * scores.deviation:.1f}" if len(scores) > 1 else "")


def _seeds(each: Comparison) -> str:
    pairs, both = len(each.one.by_seed.keys() & each.other.by_seed.keys()), {len(each.one), len(each.other)}
    return f"{pairs} of {len(each.one)} and {len(each.other)}" if both != {pairs} else str(pairs or MISSING)


def _settings(study: Study, each: Comparison, memory: bool) -> str:
    """The rate and the length, and where they lie in what was tried."""
    arm = arm_of(study, each.loss, memory, each.kind)
    config = None if arm is None else study.config(arm, 0)
    if arm is None or config is None:
        return MISSING
    choice = study.choice(arm)
    if not isinstance(choice, TunedChoice):
        return f"{config.optim.lr:g}, {config.optim.iterations:,}"
    notes = [*(["rate at the edge"] if choice.at_edge else []), *(["longest"] if choice.longest else [])]
    return ", ".join([f"{choice.picked:g}", f"{choice.length:,}", *notes])


def _images(study: Study) -> str:
    """How many images of the release the runs had."""
    runs = [run for arm in study.arms for run in study.finished(arm) if run.values.get("hits")]
    release = BENCHMARKS[study.setting.data].release if study.setting.data in BENCHMARKS else {}
    if not runs or not {"train", "test"} <= release.keys():
        return ""
    have = (runs[0].values["data"]["train_images"], runs[0].values["hits"]["queries"])
    all_of = (release["train"].images or 0, release["test"].images or 0)
    lacking = sum(all_of) - sum(have)
    if not lacking:
        return f"{study.setting.where}: all {have[0]:,} training and {have[1]:,} test images of the release."
    return (
        f"{study.setting.where}: {have[0]:,} of the release's {all_of[0]:,} training images and {have[1]:,} of its "
        f"{all_of[1]:,} test images; {lacking} are missing."
    )


def _family(study: Study) -> str:
    if study.setting.trunk != TRUNK or study.setting.data not in DATA:
        return ""
    count = len(adjusted_p(study))
    missing = "" if count == len(FAMILY) else ", the others count as p = 1"
    return f"{count} of the {len(FAMILY)} gains that were declared for Holm's correction are in{missing}."


def _sentence(study: Study, each: Comparison, paper: dict[str, Row]) -> str:
    gain = each.gain
    assert gain is not None
    change = "collapses" if each.collapsed else {1: "rises", -1: "falls", 0: "does not clearly change"}[each.verdict]
    text = (
        f"{study.setting.where}, {each.loss}, {AGAINST[each.kind]}: R@1 {change} with the memory, from "
        f"{percent(each.one.mean)} to {percent(each.other.mean)}: {in_words(gain)}"
    )
    text += "" if each.adjusted is None else f", {p_value(each.adjusted)} after Holm's correction"
    text += "" if each.redrawn is None else f"; over test classes drawn anew, {between(each.redrawn)}"
    without, with_memory = (paper[name][0] if name in paper else None for name in (each.loss, f"{each.loss} w/ M"))
    if without is None or with_memory is None:
        return f"{text}."
    if not gain.tested:
        return f"{text}. The paper: {printed_gain(without, with_memory)}."
    low, high = gain.interval()
    place = "inside" if low <= (with_memory - without) / 100 <= high else "outside"
    return f"{text}. The paper's {printed_gain(without, with_memory)} lies {place} the interval."


def _failed_choice(study: Study, loss: str, memory: bool) -> str:
    """Says so if a tuned arm is below the same arm with Table 7's schedule, which nobody chose for it."""
    tuned, letter = (arm_of(study, loss, memory, kind) for kind in (TUNED, LETTER))
    if tuned is None or letter is None:
        return ""
    scores, letter_scores, choice = study.spread(tuned), study.spread(letter), study.choice(tuned)
    gain = paired_gain(letter_scores.by_seed, scores.by_seed)
    if gain is None or gain.mean >= 0 or not isinstance(choice, TunedChoice):
        return ""
    unclear = "" if gain.sign else " The interval includes 0."
    return (
        f"{study.setting.where}, {loss} {'with' if memory else 'without'} memory: the choice failed this row. Tuned, R@1 is "
        f"{percent(scores.mean)}; with Table 7's rate and length it is {percent(letter_scores.mean)}: {in_words(gain)}."
        f"{unclear} MAP@R on held-out training classes chose rate {choice.picked:g} and {choice.length:,} iterations."
    )


def _choices(study: Study) -> list[Block]:
    """What was chosen, by which scores, and how many choices lie at an end of what was tried."""
    rows, chosen = list[list[str]](), dict[str, TunedChoice]()
    for arm in study.arms:
        choice = study.choice(arm)
        if isinstance(choice, TunedChoice):
            chosen[arm.label.removesuffix(f", {TUNED}")] = choice
            trials = ", ".join(f"{rate:g}: {percent(score)}" for rate, score in zip(choice.tried, choice.scores))
            added = ", ".join(f"{rate:g}" for rate in choice.added) or MISSING
            notes = [*(["rate at the edge"] if choice.at_edge else []), *(["longest length"] if choice.longest else [])]
            rows.append([
                arm.label, f"{choice.picked:g}", f"{choice.length:,}", percent(choice.score), trials, added, ", ".join(notes)
            ])  # fmt: skip
    if not rows:
        return []
    edge, longest = ([label for label, c in chosen.items() if at(c)] for at in (lambda c: c.at_edge, lambda c: c.longest))
    ends = f"Rates at the edge of what was tried: {listed(edge) if edge else 'none'}. "
    ends += f"Lengths at the longest that was tried: {listed(longest) if longest else 'none'}."
    ends += " Lengths are not extended, so more iterations might have been better there." if longest else ""
    header = ["MAP@R, %, held-out training classes", "rate", "length", "both folds", "trials, fold A", "rates added", ""]
    return ["What was chosen, and by which scores:", Table(header, rows), ends]


EXPERIMENTS = (
    Experiment(
        "s-table-3-tuned", "Each loss without and with memory, CUB and Cars, tuned against tuned", "supplementary, Table 3",
        DATA, tuned_arms, draw_tuned, elsewhere=False,
    ),
)  # fmt: skip
