"""Omniglot: handwritten characters, 20 drawings each; "background" is for training, "evaluation" for testing."""

import re
from collections import defaultdict
from pathlib import Path

from xbm.errors import InputError
from xbm_app.data.benchmarks.benchmark import Benchmark, Count, leave_one_out
from xbm_app.data.images import Dataset, Row

KS = (1, 2, 4, 8)
DRAWINGS = 20
LAYOUTS = (
    ("images_background", "images_evaluation"),
    ("python/images_background", "python/images_evaluation"),
    ("train", "test"),
)


def read(root: Path) -> Dataset:
    """Reads alphabet/character folders, or one folder per character. A class is one character."""
    halves = next((halves for halves in LAYOUTS if all((root / half).is_dir() for half in halves)), None)
    if halves is None:
        raise InputError(
            f"{root} holds neither images_background/ and images_evaluation/ nor train/ and test/: point --root at "
            "the folder that does"
        )
    train, test = (_rows(root, half) for half in halves)
    return leave_one_out("omniglot", root, train, test, KS)


def _rows(root: Path, half: str) -> list[Row]:
    rows = []
    for file in sorted((root / half).rglob("*.png")):
        character = file.parent.relative_to(root / half).as_posix()
        if not file.name.startswith(".") and character != ".":
            rows.append(Row(file.relative_to(root).as_posix(), character, str(file)))
    return rows


def missing(dataset: Dataset) -> list[str]:
    """Names the missing drawings: each character has NNNN_01.png to NNNN_20.png."""
    drawn: dict[str, set[int]] = defaultdict(set)
    for images in (dataset.train, dataset.protocols[0].query):
        for path in images.paths or ():
            match = re.fullmatch(r"(.*/\d+_)(\d+)\.png", path)
            if match is None:
                return []
            drawn[match[1]].add(int(match[2]))
    return [
        f"{stem}{number:02d}.png"
        for stem, numbers in drawn.items()
        for number in range(1, DRAWINGS + 1)
        if number not in numbers
    ]


OMNIGLOT = Benchmark(
    name="omniglot",
    title="Omniglot",
    source="Lake et al., Science 2015: https://github.com/brendenlake/omniglot",
    terms="MIT",
    layout=(
        "images_background/Alphabet/characterNN/*.png    964 characters (also under python/)\n"
        "images_evaluation/Alphabet/characterNN/*.png    659 characters\n"
        "                                                or train/Character/*.png and test/Character/*.png"
    ),
    ks=KS,
    paper={},
    release={"train": Count(19_280, 964), "test": Count(13_180, 659)},
    read=read,
    missing=missing,
)
