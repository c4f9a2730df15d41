"""Experiments about sizes: R@1 against batch size and memory ratio (Figure 1), and batch size with memory (Figure 6)."""

from collections.abc import Sequence
from typing import Any

from xbm.study.paper import published
from xbm.study.paper.arms import LOSSES, sized
from xbm.study.paper.blocks import NONE, Block, Claim, Figure, Table, spread
from xbm.study.paper.experiment import Arm, Experiment, Setting
from xbm.study.paper.losses import choices
from xbm.study.paper.study import Spread, Study

SIZES = (16, 32, 64, 128, 256)
RATIOS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
SAMPLERS = {"pk": "PK", "shuffle": "random shuffle"}


def figure_1_arms(setting: Setting) -> list[Arm]:
    ratios = [sized(setting, "contrastive", 16, ratio) for ratio in RATIOS]
    return ratios + [sized(setting, loss, size, 0.0) for size in reversed(SIZES) for loss in LOSSES]


def batch_arms(setting: Setting) -> list[Arm]:
    return [
        sized(setting, "contrastive", size, ratio, sampler)
        for size in (256, 16, 64, 128, 32)  # first the two that the paper's claim is about
        for sampler in SAMPLERS
        for ratio in (0.0, 1.0)
    ]


def draw_figure_1(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        by_loss = [
            _line(study, loss, [(size, sized(study.setting, loss, size, 0.0)) for size in SIZES], colour)
            for colour, loss in enumerate(LOSSES)
        ]
        by_ratio = _line(study, "contrastive", [(r, sized(study.setting, "contrastive", 16, r)) for r in RATIOS], 0)
        panels = [
            _panel("no memory", "batch size", by_loss, x_log=2, ticks=list(SIZES)),
            _panel("batch size 16, contrastive", "memory ratio R_M", [by_ratio], x_log=0.01, ticks=[0, 0.01, 0.1, 1]),
        ]
        drawn = {"panels": [panel for panel in panels if panel["lines"]]}
        if drawn["panels"]:
            caption = f"R@1 against batch size and memory ratio, {study.setting.label}."
            blocks.append(Figure(f"figure-1_{study.setting.slug}", drawn, caption))
    blocks += [
        _size_table(studies, [(loss, lambda s, size, loss=loss: sized(s, loss, size, 0.0)) for loss in LOSSES], "no memory"),
        _ratio_table(studies),
        "In the paper contrastive on In-shop, batch 16, goes from "
        f"{published.INSHOP_RATIO[0]} (R_M = 0) to {published.INSHOP_RATIO[1]} (R_M = 0.01).",
    ]  # fmt: skip
    return [*blocks, *(block for study in studies for block in choices(study))] if studies else []


def draw_batch_size(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    kinds = [(sampler, ratio) for sampler in SAMPLERS for ratio in (0.0, 1.0)]
    for study in studies:
        lines = []
        for sampler, ratio in kinds:
            arms = [(size, sized(study.setting, "contrastive", size, ratio, sampler)) for size in SIZES]
            name = f"{'with memory' if ratio else 'without'}, {SAMPLERS[sampler]}"
            line = _line(study, name, arms, 1 if ratio else 0)
            lines.append({**line, "dashed": sampler == "shuffle"})
        panel = _panel(study.setting.trunk, "batch size", lines, x_log=2, ticks=list(SIZES))
        if panel["lines"]:
            caption = f"R@1 of contrastive against batch size, {study.setting.label}."
            blocks.append(Figure(f"batch-size_{study.setting.slug}", {"panels": [panel]}, caption))
    rows = [
        (
            f"{'R_M = 1' if ratio else 'no memory'}, {SAMPLERS[sampler]}",
            lambda s, size, ratio=ratio, sampler=sampler: sized(s, "contrastive", size, ratio, sampler),
        )
        for sampler, ratio in kinds
    ]
    blocks.append(_size_table(studies, rows, "contrastive"))
    for study in studies:
        blocks += _claims(study)
    return blocks if studies else []


def _claims(study: Study) -> list[Block]:
    """The paper's two claims, next to what was found."""
    ends = [(size, ratio) for size in (16, 256) for ratio in (0.0, 1.0)]
    at = {end: study.spread(sized(study.setting, "contrastive", *end)) for end in ends}
    said: list[Block] = []
    small, large = at[16, 1.0], at[256, 0.0]
    if small is not None and large is not None:
        better = "beats" if small.mean > large.mean else "does not beat"
        said.append(
            Claim(
                f"{study.setting.where}: batch size 16 with memory {better} batch size 256 without: {spread(small)} against "
                f"{spread(large)} (the paper, SOP: {published.SMALL_BATCH_WINS[1]} against {published.SMALL_BATCH_WINS[0]})."
            )
        )
    grown = {}
    for ratio, name in ((0.0, "without"), (1.0, "with")):
        one, other = at[16, ratio], at[256, ratio]
        if one is not None and other is not None:
            points = f"{100 * (other.mean - one.mean):+.1f}".replace("-", "−")
            grown[name] = f"{points} points {name} memory (the paper, SOP: +{published.BATCH_GAIN[name]})"
    if grown:
        said.append(Claim(f"{study.setting.where}: from batch size 16 to 256, R@1 changes by {' and '.join(grown.values())}."))
    return said


def _size_table(studies: Sequence[Study], rows: Sequence[tuple[str, Any]], title: str) -> Table:
    """One row a kind and trunk, one column a batch size."""
    cells = []
    for study in studies:
        for label, arm in rows:
            found = [study.spread(arm(study.setting, size)) for size in SIZES]
            cells.append([f"{study.setting.trunk}, {label}", *(spread(each) for each in found), _count(found)])
    return Table([f"R@1, %, {title}", *(f"batch {size}" for size in SIZES), "seeds"], cells)


def _ratio_table(studies: Sequence[Study]) -> Table:
    cells = []
    for study in studies:
        found = [study.spread(sized(study.setting, "contrastive", 16, ratio)) for ratio in RATIOS]
        cells.append([study.setting.trunk, *(spread(each) for each in found), _count(found)])
    return Table(["R@1, %, contrastive, batch 16", *(f"R_M = {ratio:g}" for ratio in RATIOS), "seeds"], cells)


def _count(found: Sequence[Spread | None]) -> str:
    counts = sorted({len(each) for each in found if each is not None})
    return f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else NONE


def _line(study: Study, label: str, arms: Sequence[tuple[float, Arm]], colour: int) -> dict[str, Any]:
    found = [(x, each) for x, arm in arms if (each := study.spread(arm)) is not None]
    errors = [0.0 if each.error != each.error else round(100 * each.error, 3) for _, each in found]
    return {
        "label": label, "x": [x for x, _ in found], "y": [round(100 * each.mean, 3) for _, each in found], "error": errors,
        "colour": colour, "marker": True,
    }  # fmt: skip


def _panel(title: str, x: str, lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"title": title, "x": x, "y": "R@1, %", "lines": [line for line in lines if len(line["x"]) > 1], **more}


EXPERIMENTS = (
    Experiment(
        "figure-1", "R@1 against batch size and against memory ratio", "Figure 1", ("sop", "inshop", "vehicleid"),
        figure_1_arms, draw_figure_1,
    ),
    Experiment(
        "batch-size", "Batch size with and without memory, PK and random shuffle", "Figure 6 and section 4.3", ("sop",),
        batch_arms, draw_batch_size,
    ),
)  # fmt: skip
