"""Draws docs/retrieved.webp, the README's picture: queries of unseen classes, and their nearest images without and with memory.

`xbm train --data PHOTOS --no-memory --out WITHOUT`, `xbm train --data PHOTOS --out WITH`, then
`PYTHONPATH=. python docs/retrieved_picture.py PHOTOS WITHOUT WITH QUERY...`; without queries it lists candidates. It prints the
figures of the picture's caption, and with the picture it writes them to docs/retrieved.json.
"""

import csv
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

import xbm
from paper.record import identity
from xbm_app.train.config import load

HERE = Path(__file__).parent
SIDE, QUERY, GAP, SHOWN, NAME = 84, 130, 6, 6, 96
INK, RIGHT, WRONG = "#24292f", "#2da44e", "#cf222e"


def test_images(run: Path) -> list[tuple[str, str]]:
    """(path, label) of the images of the test classes."""
    with (run / "split.csv").open(newline="", encoding="utf-8") as file:
        return [(row["path"], row["label"]) for row in csv.DictReader(file) if row["split"] == "test"]


def neighbours(run: Path, photos: Path, images: list[tuple[str, str]]) -> np.ndarray:
    """(N, SHOWN): the nearest images of each image, itself excluded."""
    vectors = xbm.load(run).embed([photos / path for path, _ in images])
    similarity = (vectors @ vectors.T).fill_diagonal_(-2)
    return similarity.topk(SHOWN, dim=1).indices.numpy()


def square(path: Path, side: int, border: str | None = None) -> Image.Image:
    picture = ImageOps.fit(ImageOps.exif_transpose(Image.open(path)).convert("RGB"), (side, side), Image.Resampling.LANCZOS)
    return ImageOps.expand(picture.crop((4, 4, side - 4, side - 4)), 4, border) if border else picture


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def figures(labels: np.ndarray, right: list[np.ndarray]) -> dict[str, Any]:
    """The figures of the caption, from the labels (N,) and, for each run, which neighbors are right (N, SHOWN)."""
    better = right[1].sum(1) - right[0].sum(1)
    return {
        "images": len(labels),
        "classes": len(set(labels.tolist())),
        "recall@1": {name: round(float(hits[:, 0].mean()), 6) for name, hits in zip(("without", "with"), right)},
        "more_right_with_memory": int((better > 0).sum()),
        "fewer_right_with_memory": int((better < 0).sum()),
        "as_many": int((better == 0).sum()),
    }


def about(runs: list[Path], queries: list[str]) -> dict[str, Any]:
    """What the figures are from: settings and versions of both runs, the command, commit and date; no path of this machine."""
    described = {}
    for name, run in zip(("without", "with"), runs):
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        kept = {key: result[key] for key in ("versions", "finished", "data")}
        described[name] = {**kept, "config": identity(load(run / "config.yaml"))}
    return {
        "command": " ".join(["python docs/retrieved_picture.py PHOTOS WITHOUT WITH", *queries]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "xbm": xbm.__version__},
        "queries": queries,
        "runs": described,
    }


def main(photos: Path, runs: list[Path], queries: list[str], out: Path = HERE) -> None:
    images = test_images(runs[0])
    assert images == test_images(runs[1]), "the runs have different test classes"
    labels = np.array([label for _, label in images])
    nearest = [neighbours(run, photos, images) for run in runs]
    right = [labels[rows] == labels[:, None] for rows in nearest]
    found = figures(labels, right)
    for name, recall in found["recall@1"].items():
        print(f"{name} memory: R@1 {100 * recall:.1f} over {found['images']:,} images of {found['classes']} classes")
    more, fewer = found["more_right_with_memory"], found["fewer_right_with_memory"]
    print(f"more right with memory: {more}, fewer: {fewer}, as many: {found['as_many']}")
    if not queries:
        better = right[1].sum(1) - right[0].sum(1)
        for index in [*np.argsort(-better, kind="stable")[:40], *np.argsort(better, kind="stable")[:15]]:
            print(images[index][0], int(right[0][index].sum()), int(right[1][index].sum()))
        return
    width = QUERY + NAME + SHOWN * (SIDE + GAP) + 3 * GAP
    row_height = 2 * SIDE + 3 * GAP
    sheet = Image.new("RGB", (width, len(queries) * (row_height + 2 * GAP)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for number, query in enumerate(queries):
        index = [path for path, _ in images].index(query)
        top = number * (row_height + 2 * GAP) + GAP
        sheet.paste(square(photos / query, QUERY), (GAP, top + 8))
        draw.text((GAP, top + QUERY + 14), images[index][1].replace("-", " "), INK, font)
        for line, (name, rows) in enumerate(zip(("without\nmemory", "with\nmemory"), nearest)):
            y = top + line * (SIDE + GAP)
            draw.text((QUERY + 4 * GAP, y + SIDE // 2 - 18), name, INK, font)
            for place, each in enumerate(rows[index]):
                border = RIGHT if labels[each] == labels[index] else WRONG
                sheet.paste(square(photos / images[each][0], SIDE, border), (QUERY + NAME + 2 * GAP + place * (SIDE + GAP), y))
    record = {**found, **about(runs, queries)}
    sheet.save(out / "retrieved.webp", quality=82, method=6)
    (out / "retrieved.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(sys.argv[2]), Path(sys.argv[3])], sys.argv[4:])
