"""The pages of results, generated from the result files alone: a template with its sections, tables and figures filled in."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Union

from PIL import Image, ImageDraw, ImageFont

from paper.experiment import SMALL, Experiment, Setting
from paper.record import NAMED, Record, Records
from paper.study import Spread, Study
from xbm_app.data.benchmarks import BENCHMARKS
from xbm_app.data.images import Dataset
from xbm_app.files import replacing
from xbm_app.report import printed_figures
from xbm_app.report.writing import MISSING, listed, percent, recorded_device

TEMPLATES = Path(__file__).parent / "pages"
PRIVATE = Path("runs/photographs")  # contact sheets that must not be published; git ignores runs/
NO_DATA = "not run: data not available"
NOT_RUN = "not run"  # although there are other results on the same data
ENOUGH = 0.25  # draw an experiment if this share of its arms has run: with fewer, they are runs of another experiment

# ------------------------------------------------------------------ what a section consists of

Block = Union[str, "Table", "Figure", "Pictures"]  # a plain string is a paragraph


class Claim(str):
    """A paragraph with a finding; the page starts with a list of all of them."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """Cells of text; the first column is left-aligned, the others are right-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        name: file name without suffix.
        data: the values to draw, see `xbm_app/report/printed_figures.py`; the file contains their digest.
    """

    name: str
    data: Any
    caption: str


class Tile(NamedTuple):
    """One photograph of a contact sheet.

    Attributes:
        part: the set it belongs to: "train", "query" or "gallery".
        image: its index in that set.
        frame: a key of `FRAMES`.
        text: printed below it.
    """

    part: str
    image: int
    frame: str
    text: str


@dataclass(frozen=True)
class Pictures:
    """A contact sheet, which can only be drawn if its data set is available.

    Attributes:
        name: file name without suffix.
        data: name of the data set.
        rows: an empty row is a gap.
    """

    name: str
    data: str
    rows: Sequence[Sequence[Tile]]
    caption: str

    @property
    def public(self) -> bool:
        """Whether a page may show it: the terms of its data set permit redistribution."""
        return redistributable(self.data)


def redistributable(data: str) -> bool:
    """Whether images of a data set may be published; those of the built-in glyphs may."""
    return data == "glyphs" or BENCHMARKS[data].redistributable


SIDE, FRAME, TEXT, GAP, BREAK = 88, 4, 15, 5, 14  # pixels
FRAMES = {
    "anchor": "#e8b93a", "positive": "#6ba85f", "batch": "#9a9a9a", "memory": "#a2719b", "right": "#6ba85f", "wrong": "#a2719b"
}  # the paper's colors  # fmt: skip


def draw_sheet(rows: Sequence[Sequence[Tile]], dataset: Dataset) -> Image.Image:
    """Draws rows of framed thumbnails with text below them."""
    width, height = SIDE + 2 * FRAME + GAP, SIDE + 2 * FRAME + TEXT + GAP
    tops = list(accumulate((height if row else BREAK for row in rows), initial=GAP))
    sheet = Image.new("RGB", (max(len(row) for row in rows) * width + GAP, tops[-1]), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    protocol = dataset.protocols[0]
    sets = {"train": dataset.train, "query": protocol.query, "gallery": protocol.gallery or protocol.query}
    for row, top in zip(rows, tops):
        for column, tile in enumerate(row):
            left = GAP + column * width
            pen.rectangle((left, top, left + SIDE + 2 * FRAME - 1, top + SIDE + 2 * FRAME - 1), fill=FRAMES[tile.frame])
            thumbnail = sets[tile.part].open(tile.image).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            sheet.paste(thumbnail, (left + FRAME, top + FRAME))
            middle = left + FRAME + SIDE // 2
            pen.text((middle, top + SIDE + 2 * FRAME + 1), tile.text, fill="#333333", font=font, anchor="ma")
    return sheet


def printed(value: float | None) -> str:
    """A figure of the paper, which is in percent already."""
    return MISSING if value is None else f"{value:.1f}"


def printed_gain(before: float | None, after: float | None) -> str:
    """The difference of two figures of the paper."""
    return MISSING if before is None or after is None else f"{after - before:+.1f}".replace("-", "−")


def plus_minus(scores: Spread, sign: bool = False) -> str:
    """ "66.8 ± 0.4": mean and standard error in percent, or only the mean for a single seed."""
    if not scores:
        return MISSING
    mean = f"{100 * scores.mean:+.1f}" if sign else percent(scores.mean)
    return (mean if math.isnan(scores.error) else f"{mean} ± {100 * scores.error:.1f}").replace("-", "−")


# ------------------------------------------------------------------ pages


@dataclass(frozen=True)
class Document:
    """A page: its file name, which is also that of its template, and its experiments."""

    name: str
    experiments: Mapping[str, Experiment]


@dataclass(frozen=True)
class Page:
    text: str
    figures: list[Figure]
    pictures: list[Pictures]


def settings_of(records: Iterable[Record], mini: bool = False) -> list[Setting]:
    """Every data set, trunk and weights with results. A pretrained trunk's runs from scratch are no extra setting."""
    configs = (record.config for record in records)
    settings = {
        Setting(config["data.name"], config["model.trunk"], config["model.weights"], mini)
        for config in configs
        if config["data.name"] in SMALL or config["model.weights"] != "none"
    }
    return sorted(settings, key=lambda s: (s.data, s.trunk, s.weights))


def make_page(records: Records, document: Document, has_picture: Callable[[Pictures], bool], mini: bool = False) -> Page:
    """Generates the text of a page and what its figures show.

    Args:
        has_picture: whether a contact sheet that may be published exists or will be drawn.
        mini: for the miniature runs of `smoke`.
    """
    settings = settings_of(records, mini)
    sections: list[str] = []
    blocks: list[Block] = []
    claims: list[str] = []
    for experiment in document.experiments.values():
        sections.append(f"## {experiment.title}\n\n{experiment.source} · `python -m paper run {experiment.name}`")
        others = [s.data for s in settings if s.data not in experiment.data and experiment.suits(s)]
        not_run: dict[str, list[str]] = {}
        for data in dict.fromkeys((*experiment.data, *others)):
            studies = [Study(experiment, setting, records) for setting in settings if setting.data == data]
            studies = [study for study in studies if _has_enough_runs(study)]
            if not studies and data not in experiment.data:
                continue
            drawn = [block for block in experiment.draw(data, studies) if block]
            reason = NOT_RUN if any(setting.data == data for setting in settings) else NO_DATA
            if not studies and not drawn:
                not_run.setdefault(reason, []).append(data)
                continue
            sections.append(f"### {data}\n\n{provenance(studies) if studies else f'{data}: {reason}.'}")
            sections += [_markdown(block, has_picture) for block in drawn]
            blocks += drawn
            link = f"[{experiment.name}](#{_anchor(experiment.title)})"
            claims += [f"- {block} ({link})" for block in drawn if isinstance(block, Claim)]
        sections += [f"{listed(names)}: {reason}." for reason, names in not_run.items()]
    text = (TEMPLATES / document.name).read_text(encoding="utf-8").format(
        count=len(records),
        summary="## In short\n\n" + "\n".join(claims) if claims else "",
        experiments="\n\n".join(section.strip() for section in sections),
    )  # fmt: skip
    figures = [block for block in blocks if isinstance(block, Figure)]
    return Page(re.sub(r"\n{3,}", "\n\n", text), figures, [block for block in blocks if isinstance(block, Pictures)])


def _has_enough_runs(study: Study) -> bool:
    arms = study.arms
    return sum(bool(study.runs(arm)) for arm in arms) >= max(1.0, ENOUGH * len(arms))


def provenance(studies: list[Study]) -> str:
    """One line per trunk that describes its runs: data, weights, iterations, seeds, device, date."""
    lines = []
    for study in studies:
        runs = [run for arm in study.arms for run in study.runs(arm)]
        data: dict[str, int] = next((run.values["data"] for run in runs if "data" in run.values), {})
        weights = study.setting.weights if study.setting.weights in NAMED else f"`{study.setting.weights}`"
        seeds = sorted({run.seed for run in runs})
        dates = sorted({run.values["date"] for run in runs})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        images = f"{data['train_images']:,} training images of {data['train_classes']} classes" if data else ""
        images += _missing(study.setting.data, data)
        devices = listed(sorted({f"{recorded_device(run.values['device'])}, {run.values['precision']}" for run in runs}))
        iterations = listed([f"{n:,}" for n in sorted({run.config["optim.iterations"] for run in runs})])
        count = len({id(run) for run in runs})
        lines.append(
            f"- {study.setting.trunk}, weights {weights}; {images}; {iterations} iterations; "
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; "
            f"{'one run' if count == 1 else f'{count} runs'}, {devices}; {when}."
        )
    return "\n".join(lines)


def _missing(name: str, data: Mapping[str, int]) -> str:
    """How many training images the release has, if the runs had fewer."""
    release = BENCHMARKS[name].release.get("train") if name in BENCHMARKS else None
    whole = release.images if release else None
    have = (data.get("train_images"), data.get("train_classes"))
    if whole is None or release is None or have[1] != release.classes or have[0] in (None, whole):
        return ""
    return f" (of the release's {whole:,})"


def _anchor(title: str) -> str:
    """The link target of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _markdown(block: Block, has_picture: Callable[[Pictures], bool]) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Table):
        return block.markdown()
    if isinstance(block, Pictures) and not (block.public and has_picture(block)):
        command = f"`python -m paper report --data {block.data}=DIR` draws them"
        if block.public:
            return f"*{block.caption}* The photographs are not in this repository: {command}."
        local = f"with a copy of the data, {command} into `{PRIVATE}`"
        return f"*{block.caption}* The photographs may not be redistributed: {local}."
    suffix = "svg" if isinstance(block, Figure) else "webp"
    return f"![{block.caption}](figures/{block.name}.{suffix})\n\n*{block.caption}*"


def write_page(
    records: Records,
    document: Document,
    out: Path,
    datasets: Mapping[str, Dataset] | None = None,
    mini: bool = False,
    private: Path = PRIVATE,
) -> Path:
    """Writes a page and its figures under `out`. Draws the contact sheets of the given data sets; keeps those already there.
    Sheets that may not be published are drawn into `private`, and no page shows them."""
    datasets = datasets or {}
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    in_folder = {path.stem for path in folder.glob("*.webp")}
    page = make_page(records, document, lambda sheet: sheet.data in datasets or sheet.name in in_folder, mini)
    for figure in page.figures:
        path = folder / f"{figure.name}.svg"
        if drawn_from(path) != printed_figures.digest(figure.data):
            printed_figures.save(figure.data, path)
    for sheet in page.pictures:
        if sheet.data in datasets:
            place = folder if sheet.public else private
            place.mkdir(parents=True, exist_ok=True)
            draw_sheet(sheet.rows, datasets[sheet.data]).save(place / f"{sheet.name}.webp", quality=80, method=6)
    target = out / document.name
    with replacing(target) as beside:
        beside.write_text(page.text, encoding="utf-8")
    return target


def drawn_from(path: Path) -> str:
    """The digest of the values that a figure was drawn from, or an empty string if there is no such figure."""
    digest = re.search(r"values ([0-9a-f]{16})", path.read_text(encoding="utf-8")) if path.exists() else None
    return digest[1] if digest else ""
