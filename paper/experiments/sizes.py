"""Batch size and memory ratio: R@1 (Figures 1 and 6), and time and GPU memory (Table 2). How the steps of several ways to train
are timed in alternation."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paper import published
from paper.experiment import LOSSES, PLAIN_QUEUE, Arm, Experiment, Setting, base, sized
from paper.experiments.losses import choices
from paper.experiments.tuning import letter_arm
from paper.page import Block, Claim, Figure, Table, plus_minus
from paper.record import digits
from paper.statistics import Gain, in_words
from paper.study import Spread, Study
from xbm_app.progress import Console
from xbm_app.report.writing import MISSING
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import read_run
from xbm_app.train.label_errors import ignore_label_errors
from xbm_app.train.loop import steps
from xbm_app.train.state import RunState

SIZES = (16, 32, 64, 128, 256)
RATIOS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
SAMPLERS = {"PK": ("pk", False), "random shuffle": ("shuffle", False), "PK, equal passes": ("pk", True)}  # equal passes?
KINDS = [(sampler, ratio) for sampler in SAMPLERS for ratio in (0.0, 1.0)]


def figure_1_arms(setting: Setting) -> list[Arm]:
    ratios = [sized(setting, "contrastive", 16, ratio) for ratio in RATIOS if ratio]
    ratios += [sized(setting, "contrastive", 16, ratio, passes=True) for ratio in RATIOS]
    return ratios + [sized(setting, loss, size, 0.0) for size in reversed(SIZES) for loss in LOSSES]


def batch_arms(setting: Setting) -> list[Arm]:
    sizes = (256, 16, 64, 128, 32)  # the two of the paper's claim first
    return [_batch_arm(setting, size, sampler, ratio) for size in sizes for sampler, ratio in KINDS]


def _batch_arm(setting: Setting, size: int, sampler: str, ratio: float) -> Arm:
    return sized(setting, "contrastive", size, ratio, *SAMPLERS[sampler])


def draw_figure_1(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        by_loss = [
            _line(study, loss, [(size, sized(study.setting, loss, size, 0.0)) for size in SIZES], colour)
            for colour, loss in enumerate(LOSSES)
        ]
        by_ratio = [
            _line(study, name, [(r, sized(study.setting, "contrastive", 16, r, passes=passes)) for r in RATIOS], int(passes))
            for name, passes in (("equal iterations", False), ("equal passes", True))
        ]
        panels = [
            _panel("no memory", "batch size", by_loss, x_log=2, ticks=list(SIZES)),
            _panel("batch size 16, contrastive", "memory ratio R_M", by_ratio, x_log=0.01, ticks=[0, 0.01, 0.1, 1]),
        ]
        blocks += _figure("figure-1", study, panels, "R@1 against batch size and memory ratio")
    losses = {loss: lambda s, size, loss=loss: sized(s, loss, size, 0.0) for loss in LOSSES}
    blocks += [
        _table("no memory", studies, {f"batch {size}": size for size in SIZES}, losses),
        _table(
            "contrastive, batch 16", studies, {f"R_M = {ratio:g}": ratio for ratio in RATIOS},
            {
                "": lambda s, ratio: sized(s, "contrastive", 16, ratio),
                "equal passes": lambda s, ratio: sized(s, "contrastive", 16, ratio, passes=True),
            },
        ),
        "In the paper, contrastive on In-shop with batch size 16 improves from "
        f"{published.INSHOP_RATIO[0]} (R_M = 0) to {published.INSHOP_RATIO[1]} (R_M = 0.01).",
    ]  # fmt: skip
    return [*blocks, *(block for study in studies for block in choices(study))] if studies else []


def draw_batch_size(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        panels = []
        for title, samplers in (("equal iterations", ("PK", "random shuffle")), ("equal passes", ("PK, equal passes",))):
            lines = []
            for sampler, ratio in [kind for kind in KINDS if kind[0] in samplers]:
                name = f"{'with memory' if ratio else 'without'}, {sampler.partition(',')[0]}"
                arms = [(size, _batch_arm(study.setting, size, sampler, ratio)) for size in SIZES]
                lines.append({**_line(study, name, arms, int(ratio)), "dashed": sampler == "random shuffle"})
            panels.append(_panel(f"{study.setting.trunk}, {title}", "batch size", lines, x_log=2, ticks=list(SIZES)))
        blocks += _figure("batch-size", study, panels, "R@1 of contrastive against batch size")
    rows = {
        f"{'R_M = 1' if ratio else 'no memory'}, {sampler}":
            lambda setting, size, sampler=sampler, ratio=ratio: _batch_arm(setting, size, sampler, ratio)
        for sampler, ratio in KINDS
    }  # fmt: skip
    blocks += [_table("contrastive", studies, {f"batch {size}": size for size in SIZES}, rows), *map(_passes, studies)]
    for study in studies:
        blocks += [*_claims(study, "PK"), *_claims(study, "PK, equal passes")]
    return blocks if studies else []


def _passes(study: Study) -> str:
    """What differs between two batch sizes apart from the size."""
    small, large = (_passes_of(study, _batch_arm(study.setting, size, "PK", 0.0)) for size in (SIZES[0], SIZES[-1]))
    if not small or not large:
        return ""
    return (
        f"{study.setting.where}: all sizes use the same learning rate. With equal iterations, as in the paper, a batch size of "
        f"{SIZES[-1]} makes {large:.0f} passes over the training images and one of {SIZES[0]} makes {small:.0f}; with equal "
        f"passes, all sizes make as many as a batch size of {base(study.setting).batch.size}."
    )


def _passes_of(study: Study, arm: Arm) -> float:
    """How often an arm's runs pass over the training images; 0 if there is none."""
    runs = study.finished(arm)[:1]
    return sum(run.values["iterations"] * run.config["batch.size"] / run.values["data"]["train_images"] for run in runs)


def _claims(study: Study, sampler: str) -> list[Block]:
    """The paper's two claims, and what we found. Batches of another size come in another order: seeds are not paired."""
    arms = {(size, ratio): _batch_arm(study.setting, size, sampler, ratio) for size in (16, 256) for ratio in (0.0, 1.0)}
    scores = {which: study.spread(arm) for which, arm in arms.items()}
    claims: list[Block] = []
    equal_passes = SAMPLERS[sampler][1]
    where = f"{study.setting.where}, equal passes" if equal_passes else study.setting.where
    small, large = scores[16, 1.0], scores[256, 0.0]
    lead = small.over(large)
    if lead is not None:
        passes = [_passes_of(study, arms[which]) for which in ((16, 1.0), (256, 0.0))]
        beside = "" if equal_passes or not all(passes) else "; {:.0f} passes over the images against {:.0f}".format(*passes)
        paper = "" if equal_passes else "; the paper, SOP: {1} against {0}".format(*published.SMALL_BATCH_WINS)
        claims.append(Claim(
            f"{where}: batch size 16 with memory {_against(lead)} batch size 256 without: {plus_minus(small)} against "
            f"{plus_minus(large)}, {in_words(lead)}{beside}{paper}."
        ))  # fmt: skip
    changes = []
    for ratio, name in ((0.0, "without"), (1.0, "with")):
        change = scores[256, ratio].over(scores[16, ratio])
        if change is not None:
            paper = "" if equal_passes else f" (the paper, SOP: +{published.BATCH_GAIN[name]})"
            changes.append(f"{in_words(change)} {name} memory{paper}")
    if changes:
        claims.append(Claim(f"{where}: from batch size 16 to 256, R@1 changes by {' and '.join(changes)}."))
    return claims


def _against(lead: Gain) -> str:
    if not lead.tested:
        return "scores higher than" if lead.mean > 0 else "does not score higher than"
    return {1: "beats", 0: "is not clearly ahead of", -1: "is behind"}[lead.sign]


def _table(
    title: str, studies: Sequence[Study], columns: dict[str, Any], rows: Mapping[str, Callable[[Setting, Any], Arm]]
) -> Table:
    """R@1, one row per trunk and kind of run, one column per batch size or memory ratio."""
    lines = []
    for study in studies:
        for label, arm in rows.items():
            scores = [study.spread(arm(study.setting, value)) for value in columns.values()]
            if any(scores):
                name = ", ".join(filter(None, (study.setting.trunk, label)))
                lines.append([name, *map(plus_minus, scores), _seed_counts(scores)])
    return Table([f"R@1, %, {title}", *columns, "seeds"], lines)


def _seed_counts(scores: Sequence[Spread]) -> str:
    counts = sorted({len(each) for each in scores if each})
    return f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else MISSING


def _line(study: Study, label: str, arms: Sequence[tuple[float, Arm]], colour: int) -> dict[str, Any]:
    points = [(x, scores) for x, arm in arms if (scores := study.spread(arm))]
    errors = [0.0 if scores.error != scores.error else round(100 * scores.error, 3) for _, scores in points]
    return {
        "label": label, "x": [x for x, _ in points], "y": [round(100 * scores.mean, 3) for _, scores in points],
        "error": errors, "colour": colour, "marker": True,
    }  # fmt: skip


def _panel(title: str, x: str, lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"title": title, "x": x, "y": "R@1, %", "lines": [line for line in lines if len(line["x"]) > 1], **more}


def _figure(name: str, study: Study, panels: Sequence[dict[str, Any]], caption: str) -> list[Block]:
    drawn = [panel for panel in panels if panel["lines"]]
    return [Figure(f"{name}_{study.setting.slug}", {"panels": drawn}, f"{caption}, {study.setting.label}.")] if drawn else []


# ------------------------------------------------------------------ time and GPU memory

ALONE = ", Table 7"  # the recipe `paper`: only the loss against the memory is left
TABLE_2 = {
    "batch 64": (64, 0.0), "batch 256": (256, 0.0), "batch 64, R_M = 0.01": (64, 0.01), "batch 64, R_M = 1": (64, 1.0),
    f"batch 64, R_M = 1{ALONE}": (64, 1.0),
}  # fmt: skip
TIMED = {"optim.iterations": 600, "optim.decay_at": (), "memory.start": 0, "memory.fill": False, "log.every": 100}


def cost_arms(setting: Setting) -> list[Arm]:
    """For each row a short run that is timed and a full one that is scored."""
    timed, full = [], []
    for label, (size, ratio) in TABLE_2.items():
        arm = sized(setting, "contrastive", size, ratio)
        if label.endswith(ALONE):
            arm = replace(letter_arm(setting, "contrastive", memory=True), label=label)
        timed.append(Arm(f"{label}, timed", {**arm.settings, **TIMED}, choose=None, measures=("cost",), seeds=1))
        full.append(Arm(label, arm.settings, arm.choose, arm.chosen_as))
    return timed + full


def measure_cost(config: Config, folder: Path) -> dict[str, Any]:
    """Seconds per iteration without start-up: the difference between the run and one of a sixth of its length."""
    from xbm_app.train.loop import train

    length = config.optim.iterations
    short = length // 6
    long_run = json.loads((folder / "result.json").read_text())
    with tempfile.TemporaryDirectory() as other:
        short_run = train(override(config, {"optim.iterations": short}), Path(other) / "run", quiet=True)
    elapsed = length * long_run["seconds_per_iteration"] - short * short_run["seconds_per_iteration"]
    return {"seconds_per_iteration": digits(elapsed / (length - short)), "peak_memory_bytes": long_run["peak_memory_bytes"]}


def draw_cost(data: str, studies: Sequence[Study]) -> list[Block]:
    rows = [["paper (SOP, GoogLeNet)"] + [""] * 4]
    for label, (hours, gigabytes, recall) in published.TABLE_2.items():
        extra = "" if label == "batch 64" else "+"
        rows.append([label, MISSING, f"{hours:.2f} h", f"{extra}{gigabytes:g} GB", f"{recall:.1f}"])
    devices = set()
    for study in studies:
        rows.append([study.setting.label] + [""] * 4)
        iterations = base(study.setting).optim.iterations
        arms = {arm.label: arm for arm in study.arms}
        baseline = 0  # bytes of the first row
        for label in TABLE_2:
            times, memory = [MISSING, MISSING], MISSING
            timed = next((run for run in study.runs(arms[f"{label}, timed"]) if "cost" in run.measures), None)
            if timed is not None:
                devices.add(timed.values["device"])
                seconds, peak = (timed.measures["cost"][name] for name in ("seconds_per_iteration", "peak_memory_bytes"))
                times = [f"{1000 * seconds:.1f} ms", f"{seconds * iterations / 60:.1f} min"]
                if peak is not None and label == "batch 64":
                    baseline, memory = peak, f"{peak / 1e9:.2f} GB"
                elif peak is not None:
                    memory = f"{(peak - baseline) / 1e9:+.2f} GB"
            rows.append([label, *times, memory, plus_minus(study.spread(arms[label]))])
    note = (
        "The time per iteration is the difference between a run of 600 and one of 100 iterations, divided by 500; the time of "
        "a schedule is that times its iterations. Memory is the peak of allocated tensors, including images on the GPU."
    )
    note += f" Ours were measured on {', '.join(sorted(devices))}." if devices else ""
    return [Table(["", "an iteration", "schedule", "GPU memory", "R@1, %"], rows), note] if studies else []


# ------------------------------------------------------------------ steps timed in alternation

TURNS = 12


class Steps:
    """Trains a config some steps at a time. Its memory, if it has one, is used from the first step."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.run = RunState(config, read_run(config, folder), folder)
        self.run.model.train()
        self.learn_next = steps(self.run, 0, Console(config.optim.iterations, 0, quiet=True))
        self.done = 0

    def seconds(self, count: int) -> float:
        """Makes the next `count` steps and returns the time per step, including the work queued on the device."""
        self._wait()
        start = time.perf_counter()
        for step in range(self.done, self.done + count):
            self.run.set_learning_rate(step)
            self.learn_next(step, self.run.memory is not None)
            if self.run.label_memory is not None and (step + 1) % self.run.label_check_every == 0:
                ignore_label_errors(self.run.label_memory, self.run.dataset.train.num_classes)
        self._wait()
        self.done += count
        return (time.perf_counter() - start) / count

    def _wait(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)


def in_turns(configs: Mapping[str, Config], folder: Path) -> dict[str, list[float]]:
    """Seconds per step of several configs, trained in alternation in one process: whatever slows the machine slows them all.

    The first quarter of the shortest schedule is not timed: kernels are compiled and memories fill.

    Args:
        configs: by name; they train on the same data.
        folder: of a run on that data.
    """
    trained = {name: Steps(config, folder) for name, config in configs.items()}
    length = min(config.optim.iterations for config in configs.values())
    warm_up = max(1, length // 4)
    turns = min(TURNS, length - warm_up)
    for each in trained.values():
        each.seconds(warm_up)
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    order = list(configs)
    for _ in range(turns):
        for name in order:
            seconds[name].append(trained[name].seconds((length - warm_up) // turns))
        order.reverse()  # so that none always comes second
    return seconds


def measure_step_times(config: Config, folder: Path) -> dict[str, list[float]]:
    """Seconds per step, turn by turn, of the run's config and of the same config with a plain queue."""
    times = in_turns({"queue": override(config, PLAIN_QUEUE), "ours": config}, folder)
    return {name: [digits(seconds) for seconds in each] for name, each in times.items()}


EXPERIMENTS = (
    Experiment(
        "figure-1", "R@1 against batch size and against memory ratio", "Figure 1", ("sop", "inshop", "vehicleid"),
        figure_1_arms, draw_figure_1,
    ),
    Experiment(
        "batch-size", "Batch size with and without memory, PK and random shuffle", "Figure 6 and section 4.3", ("sop",),
        batch_arms, draw_batch_size,
    ),
    Experiment("table-2", "Time and GPU memory", "Table 2", ("sop",), cost_arms, draw_cost),
)  # fmt: skip
