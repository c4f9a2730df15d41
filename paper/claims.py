"""The paper's claims, one by one: a verdict on each, computed from the results of the experiment that tests it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from paper import published
from paper.experiment import Arm, sized
from paper.experiments import ALL, drift, s_table_3, updates
from paper.experiments.losses import OURS
from paper.experiments.sizes import TABLE_2
from paper.experiments.tuning import TUNED, label_of
from paper.page import NOT_RUN, TEMPLATES, settings_of
from paper.record import Records
from paper.statistics import Gain, between, equivalence_p, paired_gain, points
from paper.study import Spread, Study
from xbm_app.files import replacing
from xbm_app.report.writing import percent

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"
NOT_YET, ONE_SEED, UNTESTABLE = f"{NOT_RUN} yet", "not tested yet", "not testable here"
PAGE = "claims.md"


class Finding(NamedTuple):
    """What one setting says of a claim.

    Attributes:
        agrees: whether its test agrees; None if one seed allows no test.
        text: the setting and the figures.
    """

    agrees: bool | None
    text: str


Check = Callable[[Study], list[Finding]]


@dataclass(frozen=True)
class PaperClaim:
    """Attributes:
    text: the claim, in one line.
    source: its place in the paper.
    experiment: what tests it; "" if nothing here can.
    check: the findings of one study, empty if its runs are missing; None if nothing here can test the claim.
    why: the reason, for a claim that nothing here can test.
    """

    text: str
    source: str
    experiment: str = ""
    check: Check | None = None
    why: str = ""

    def findings(self, records: Records) -> list[Finding]:
        if self.check is None:
            return []
        experiment = ALL[self.experiment]
        studies = [Study(experiment, setting, records) for setting in settings_of(records) if experiment.suits(setting)]
        return [finding for study in studies for finding in self.check(study)]

    def verdict(self, findings: Sequence[Finding]) -> str:
        if self.check is None:
            return UNTESTABLE
        tested = [finding.agrees for finding in findings if finding.agrees is not None]
        if not tested:
            return ONE_SEED if findings else NOT_YET
        return HOLDS if all(tested) else IN_PART if any(tested) else FAILS


# ------------------------------------------------------------------ what is checked


def _arms(study: Study) -> dict[str, Arm]:
    return {arm.label: arm for arm in study.arms}


def _found(study: Study, gain: Gain | None, agrees: Callable[[Gain], bool], name: str = "") -> list[Finding]:
    """A finding about a difference, with its interval."""
    if gain is None:
        return []
    interval = f" ({between(gain.interval())})" if gain.tested else " (one seed)"
    where = f"{study.setting.where}{f', {name}' if name else ''}"
    return [Finding(agrees(gain) if gain.tested else None, f"{where}: {points(gain.mean)}{interval}")]


def rises(gain: Gain) -> bool:
    return gain.sign > 0


def _drifts(name: str, arm: str, study: Study) -> list[Finding]:
    runs = [run for each in study.arms if each.label == arm for run in study.finished(each)[:1]]
    found = [(run, drift.verdicts(run)) for run in runs]
    learned = {id(run): f", R@1 {percent(run.score())}" if run.values["scores"] else "" for run in runs}
    return [
        Finding(right, f"{study.setting.where}{learned[id(run)]}: {text}")
        for run, verdicts in found
        for key, (right, text) in verdicts.items()
        if name in (key, "")
    ]


def _lemma(study: Study) -> list[Finding]:
    found = []
    for arm in study.arms:
        if measured := study.measurement(arm, "lemma"):
            within = [
                error <= 1.001 * measured["C"][anchor] * epsilon
                for pairs in measured["pairs"].values()
                for anchor, epsilon, error in zip(pairs["anchor"], pairs["epsilon"], pairs["error"])
            ]
            share = sum(within) / len(within)
            found.append(Finding(share == 1, f"{study.setting.where}, {arm.label}: {percent(share)} % of the pairs"))
    return found


def _constant(study: Study) -> list[Finding]:
    found = []
    for arm in study.arms:
        if measured := study.measurement(arm, "lemma"):
            middle = median(measured["C"])
            found.append(Finding(middle < 1, f"{study.setting.where}, {arm.label}: median {middle:,.0f}"))
    return found


def _valid_negatives(study: Study) -> list[Finding]:
    found = []
    for run in (run for arm in study.arms for run in study.finished(arm)[:1]):
        curves = [run.curve(f"valid_negatives_{source}")[1] for source in ("batch", "memory")]
        last = [values[len(values) * 3 // 4 :] for values in curves]
        if all(last):
            batch, memory = (sum(values) / len(values) for values in last)
            few, many = published.VALID_NEGATIVES
            text = f"{study.setting.where}: {batch:,.0f} from the batch, {memory:,.0f} from the memory"
            found.append(Finding(memory * few >= batch * many, text))
    return found


def _memory_helps(loss: str, study: Study) -> list[Finding]:
    each = s_table_3.compare(study, loss, TUNED)
    return _found(study, each.gain, lambda gain: each.verdict > 0)


def _tuned(study: Study, loss: str, memory: bool) -> Spread:
    arm = _arms(study).get(label_of(loss, memory, TUNED))
    return Spread() if arm is None else study.spread(arm)


def _contrastive_gains_more(study: Study) -> list[Finding]:
    gains = []
    for loss in ("MS", "contrastive"):
        one, other = (_tuned(study, loss, memory).by_seed for memory in (False, True))
        gains.append({seed: other[seed] - one[seed] for seed in one if seed in other})
    return _found(study, paired_gain(*gains), rises, "contrastive's gain less MS's")


def _beats_ms(study: Study) -> list[Finding]:
    return _found(study, paired_gain(_tuned(study, "MS", False).by_seed, _tuned(study, "contrastive", True).by_seed), rises)


def _hardest(study: Study) -> list[Finding]:
    found = []
    for arm in study.arms:
        by_loss = study.measurement(arm, "outliers") if arm.label.startswith("MS") else None
        if by_loss and all(by_loss[loss].get("anchors") for loss in ("multi_similarity", "contrastive")):
            ms, plain = (by_loss[loss]["hardest"] for loss in ("multi_similarity", "contrastive"))
            found.append(
                Finding(ms > plain, f"{study.setting.where}: {percent(ms)} % of the weight, contrastive {percent(plain)} %")
            )
    return found


def _size(study: Study, size: int, ratio: float, sampler: str = "pk", passes: bool = False) -> Spread:
    return study.spread(sized(study.setting, "contrastive", size, ratio, sampler, passes))


def _small_batch(passes: bool, study: Study) -> list[Finding]:
    return _found(study, _size(study, 16, 1.0, passes=passes).over(_size(study, 256, 0.0, passes=passes)), rises)


def _size_matters_less(study: Study) -> list[Finding]:
    without, with_memory = (_size(study, 256, ratio).over(_size(study, 16, ratio)) for ratio in (0.0, 1.0))
    if without is None or with_memory is None:
        return []
    tested = without.tested and with_memory.tested
    text = f"{study.setting.where}: {points(without.mean)} without memory, {points(with_memory.mean)} with it"
    less = abs(with_memory.mean) < abs(without.mean)
    return [Finding(less if tested else None, text + ("" if tested else " (one seed)"))]


def _shuffle(study: Study) -> list[Finding]:
    usual, shuffled = (_size(study, 64, 1.0, sampler) for sampler in ("pk", "shuffle"))
    return _found(study, shuffled.over(usual), lambda gain: equivalence_p(gain) < 0.05)


def _small_memory(study: Study) -> list[Finding]:
    return _found(study, _size(study, 16, 0.01).over(_size(study, 16, 0.0)), rises)


def _momentum(study: Study) -> list[Finding]:
    gain, data = updates.trend(study)
    return _found(study, gain, rises, "a value of m") if data and study.setting.data == data[0] else []


def _no_gain(study: Study) -> list[Finding]:
    """No arm is ahead of the second one: α = 0, or the update ×1."""
    arms = study.arms
    first = next(k for k, arm in enumerate(arms) if arm.label in ("α = 0", "update ×1"))
    base = study.spread(arms[first])
    gains = {arm.label: paired_gain(base.by_seed, study.spread(arm).by_seed) for arm in arms[first + 1 :]}
    found = [_found(study, gain, lambda gain: gain.sign <= 0, label) for label, gain in gains.items()]
    return [finding for each in found for finding in each]


def _cost(study: Study) -> list[Finding]:
    arms, rows = _arms(study), [label for label in TABLE_2 if label in ("batch 64", "batch 64, R_M = 1")]
    costs = [study.measurement(arms[f"{label}, timed"], "cost") for label in rows]
    if not all(costs) or any(cost["peak_memory_bytes"] is None for cost in costs):
        return []
    seconds = costs[1]["seconds_per_iteration"] / costs[0]["seconds_per_iteration"] - 1
    gigabytes = (costs[1]["peak_memory_bytes"] - costs[0]["peak_memory_bytes"]) / 1e9
    hours, extra, _ = published.TABLE_2["batch 64, R_M = 1"]
    most = hours / published.TABLE_2["batch 64"][0] - 1
    return [
        Finding(seconds <= most and gigabytes <= extra, f"{study.setting.where}: {100 * seconds:+.0f} %, {gigabytes:+.2f} GB")
    ]


def _tricks(study: Study) -> list[Finding]:
    arms, found = _arms(study), list[Finding]()
    for label, arm in arms.items():
        usual = next((each for each in arms if label.startswith(f"{each}, ")), None)
        if usual is not None:
            gain = paired_gain(study.spread(arms[usual]).by_seed, study.spread(arm).by_seed)
            found += _found(study, gain, lambda gain: gain.sign > 0 and gain.mean > 0.02, label)
    return found


def _best_of_all(study: Study) -> list[Finding]:
    scores = {arm.label.removesuffix(f", {TUNED}"): study.spread(arm) for arm in study.arms}
    ours = scores.pop(OURS, Spread())
    gains = {name: paired_gain(ours.by_seed, spread.by_seed) for name, spread in scores.items()}
    return [
        finding
        for name, gain in gains.items()
        if not name.startswith("contrastive")
        for finding in _found(study, gain, lambda gain: gain.sign < 0, name)
    ]


SCRATCH = ("from scratch, contrastive", "from scratch, classification")
NO_LARGE = "SOP, In-shop, VehicleID and DeepFashion2 images cannot be had"
CLAIMS = (
    PaperClaim("Within 10 iterations, embeddings drift little", "Figure 3", "drift", partial(_drifts, "small", SCRATCH[0])),
    PaperClaim(
        "Trained from scratch, they are stable after about 3,000 iterations", "Figure 3", "drift",
        partial(_drifts, "stable", SCRATCH[0]),
    ),
    PaperClaim(
        "They drift extremely slowly once the learning rate falls", "Figure 3", "drift", partial(_drifts, "decay", SCRATCH[0]),
    ),
    PaperClaim(
        "A classifier's features drift slowly too", "supplementary, Figure 1", "drift", partial(_drifts, "", SCRATCH[1]),
    ),
    PaperClaim("Old embeddings change a gradient by at most C · ε", "Lemma 1", "lemma-1", _lemma),
    PaperClaim("C is often below 1", "Lemma 1", "lemma-1", _constant),
    PaperClaim(
        "The memory has a hundred times as many valid negatives as the batch", "Figure 4", "valid-negatives", _valid_negatives,
    ),
    PaperClaim(
        "The memory raises R@1 of the contrastive loss", "S-Table 3", "s-table-3-tuned", partial(_memory_helps, "contrastive"),
    ),
    PaperClaim("The memory raises R@1 of the triplet loss", "S-Table 3", "s-table-3-tuned", partial(_memory_helps, "triplet")),
    PaperClaim("The memory raises R@1 of multi-similarity", "S-Table 3", "s-table-3-tuned", partial(_memory_helps, "MS")),
    PaperClaim("Contrastive gains more than multi-similarity", "section 4.3", "s-table-3-tuned", _contrastive_gains_more),
    PaperClaim("Multi-similarity weighs the hardest negatives more heavily", "section 4.3", "ms-outliers", _hardest),
    PaperClaim("Contrastive with memory beats multi-similarity without", "section 4.3", "s-table-3-tuned", _beats_ms),
    PaperClaim("Contrastive with memory beats elaborate losses", "Tables 3–5, S-Table 4", "methods", _best_of_all),
    PaperClaim("Batch 16 with memory beats batch 256 without", "section 4.3", "batch-size", partial(_small_batch, False)),
    PaperClaim(
        "The same at equal passes over the images (not tested in the paper)",
        "section 4.3", "batch-size", partial(_small_batch, True),
    ),
    PaperClaim("With memory, the batch size matters less", "Figure 6", "batch-size", _size_matters_less),
    PaperClaim("With memory, random shuffle is as good as PK", "Figure 6", "batch-size", _shuffle),
    PaperClaim("One percent of the images in memory already helps", "Figure 1", "figure-1", _small_memory),
    PaperClaim("On small data sets, a slow moving average helps", "S-Table 1", "s-table-1", _momentum),
    PaperClaim("Back-propagation to the memory brings no clear gain", "S-Table 2", "s-table-2", _no_gain),
    PaperClaim("Enqueuing ten batches per iteration brings no clear gain", "S-Table 6", "s-table-6", _no_gain),
    PaperClaim("The memory costs at most 52 % more time and 0.2 GB", "Table 2", "table-2", _cost),
    PaperClaim(
        "Freezing batch norm, or the trunk at lr / 10, adds 2 points on CUB and Cars",
        "supplementary, section 1", "tricks", _tricks,
    ),
    PaperClaim("R@1 rises by 12 to 22.5 points on SOP, In-shop and VehicleID", "Table 1", why=NO_LARGE),
    PaperClaim("Contrastive with memory is the state of the art on them", "Tables 3–5", why=NO_LARGE),
    PaperClaim("R@1 rises by 11.2 points on DeepFashion2", "S-Table 5", why=NO_LARGE),
)  # fmt: skip


# ------------------------------------------------------------------ the page


def count_verdicts(records: Records) -> dict[str, int]:
    """How many claims have which verdict."""
    verdicts = [claim.verdict(claim.findings(records)) for claim in CLAIMS]
    return {verdict: verdicts.count(verdict) for verdict in (HOLDS, IN_PART, FAILS, ONE_SEED, NOT_YET, UNTESTABLE)}


def claims_page(records: Records) -> str:
    rows = list[list[str]]()
    for number, claim in enumerate(CLAIMS, start=1):
        findings = claim.findings(records)
        verdict = claim.verdict(findings)
        experiment = f"`{claim.experiment}`" if claim.experiment else "–"
        why = "; ".join(finding.text for finding in findings) or claim.why or "–"
        rows.append([str(number), claim.text, claim.source, f"**{verdict}**", experiment, why])
    header = [
        "",
        "the paper's claim",
        "where",
        "verdict",
        "experiment",
        "why: a change of R@1 in points (95 % interval), or as said",
    ]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
    counted = [f"{name}: {count}" for name, count in count_verdicts(records).items() if count]
    summary = f"**{len(CLAIMS)} claims.** {'; '.join(counted)}."
    template = (TEMPLATES / PAGE).read_text(encoding="utf-8")
    return template.format(count=len(records), summary=summary, experiments=table)


def write_claims(records: Records, out: Path) -> Path:
    target = out / PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as beside:
        beside.write_text(claims_page(records), encoding="utf-8")
    return target
