"""Experiments about sizes: R@1 against batch size and memory ratio (Figure 1), and batch size with memory (Figure 6)."""

from collections.abc import Sequence
from typing import Any

from paper import published
from paper.arms import LOSSES, sized
from paper.blocks import NONE, Block, Claim, Figure, Table, spread
from paper.experiment import Arm, Experiment, Setting, base
from paper.losses import choices
from paper.study import Spread, Study

SIZES = (16, 32, 64, 128, 256)
RATIOS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
WAYS = {"PK": ("pk", False), "random shuffle": ("shuffle", False), "PK, equal passes": ("pk", True)}  # sampler, equal passes
KINDS = [(way, ratio) for way in WAYS for ratio in (0.0, 1.0)]


def figure_1_arms(setting: Setting) -> list[Arm]:
    ratios = [sized(setting, "contrastive", 16, ratio) for ratio in RATIOS if ratio]
    return ratios + [sized(setting, loss, size, 0.0) for size in reversed(SIZES) for loss in LOSSES]


def batch_arms(setting: Setting) -> list[Arm]:
    sizes = (256, 16, 64, 128, 32)  # first the two that the paper's claim is about
    return [_batch(setting, size, way, ratio) for size in sizes for way, ratio in KINDS]


def _batch(setting: Setting, size: int, way: str, ratio: float) -> Arm:
    return sized(setting, "contrastive", size, ratio, *WAYS[way])


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
    for study in studies:
        panels = []
        for title, ways in (("equal iterations", ("PK", "random shuffle")), ("equal passes", ("PK, equal passes",))):
            lines = []
            for way, ratio in [kind for kind in KINDS if kind[0] in ways]:
                name = f"{'with memory' if ratio else 'without'}, {way.partition(',')[0]}"
                line = _line(study, name, [(size, _batch(study.setting, size, way, ratio)) for size in SIZES], int(ratio))
                lines.append({**line, "dashed": way == "random shuffle"})
            panels.append(_panel(f"{study.setting.trunk}, {title}", "batch size", lines, x_log=2, ticks=list(SIZES)))
        drawn = {"panels": [panel for panel in panels if panel["lines"]]}
        if drawn["panels"]:
            caption = f"R@1 of contrastive against batch size, {study.setting.label}."
            blocks.append(Figure(f"batch-size_{study.setting.slug}", drawn, caption))
    rows = [
        (
            f"{'R_M = 1' if ratio else 'no memory'}, {way}",
            lambda setting, size, way=way, ratio=ratio: _batch(setting, size, way, ratio),
        )
        for way, ratio in KINDS
    ]
    blocks += [_size_table(studies, rows, "contrastive"), *map(_passes, studies)]
    for study in studies:
        blocks += [*_claims(study, "PK"), *_claims(study, "PK, equal passes")]
    return blocks if studies else []


def _passes(study: Study) -> str:
    """What else than its size differs between batches of two sizes."""
    found = [run for size in (SIZES[0], SIZES[-1]) for run in study.finished(_batch(study.setting, size, "PK", 0.0))[:1]]
    if len(found) < 2:
        return ""
    often = [run.values["iterations"] * run.config["batch.size"] / run.values["data"]["train_images"] for run in found]
    return (
        f"{study.setting.where}: learning rates are the same at every size. With equal iterations, as in the paper, a batch of "
        f"{SIZES[-1]} goes {often[1]:.0f} times through the training images and one of {SIZES[0]} {often[0]:.0f} times; with "
        f"equal passes all go through them as often as a batch of {base(study.setting).batch.size}."
    )


def _claims(study: Study, way: str) -> list[Block]:
    """The paper's two claims, next to what was found."""
    ends = [(size, ratio) for size in (16, 256) for ratio in (0.0, 1.0)]
    at = {(size, ratio): study.spread(_batch(study.setting, size, way, ratio)) for size, ratio in ends}
    said: list[Block] = []
    papers = not WAYS[way][1]
    where = study.setting.where if papers else f"{study.setting.where}, equal passes"
    small, large = at[16, 1.0], at[256, 0.0]
    if small is not None and large is not None:
        better = "beats" if small.mean > large.mean else "does not beat"
        theirs = " (the paper, SOP: {1} against {0})".format(*published.SMALL_BATCH_WINS) if papers else ""
        said.append(
            Claim(
                f"{where}: batch size 16 with memory {better} batch size 256 without: {spread(small)} against "
                f"{spread(large)}{theirs}."
            )
        )
    grown = {}
    for ratio, name in ((0.0, "without"), (1.0, "with")):
        one, other = at[16, ratio], at[256, ratio]
        if one is not None and other is not None:
            points = f"{100 * (other.mean - one.mean):+.1f}".replace("-", "−")
            grown[name] = f"{points} points {name} memory"
            grown[name] += f" (the paper, SOP: +{published.BATCH_GAIN[name]})" if papers else ""
    if grown:
        said.append(Claim(f"{where}: from batch size 16 to 256, R@1 changes by {' and '.join(grown.values())}."))
    return said


def _size_table(studies: Sequence[Study], rows: Sequence[tuple[str, Any]], title: str) -> Table:
    """One row a kind and trunk, one column a batch size."""
    cells = []
    for study in studies:
        for label, arm in rows:
            found = [study.spread(arm(study.setting, size)) for size in SIZES]
            if any(found):
                cells.append([f"{study.setting.trunk}, {label}", *(spread(each) for each in found), _count(found)])
    return Table([f"R@1, %, {title}", *(f"batch {size}" for size in SIZES), "seeds"], cells)


def _ratio_table(studies: Sequence[Study]) -> Table:
    cells = []
    for study in studies:
        found = [study.spread(sized(study.setting, "contrastive", 16, ratio)) for ratio in RATIOS]
        if any(found):
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
