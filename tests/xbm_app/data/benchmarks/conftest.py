"""Miniatures of the benchmarks in the layouts that their owners use: a few tiny images each, no two alike."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

Draw = Callable[[Path], None]


@pytest.fixture
def draw() -> Draw:
    numbers = count()

    def save(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = next(numbers)
        Image.new("RGB", (23, 19), (number % 256, number // 256, 40)).save(path)

    return save


def lines(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def sop(root: Path, draw: Draw) -> None:
    header = "image_id class_id super_class_id path"
    for half, classes, first in (("train", (1, 2, 3), 1), ("test", (11319, 11320), 10)):
        rows = []
        for label in classes:
            for shot in range(2 + label % 2):
                path = f"bicycle_final/{label:06d}_{shot}.JPG"
                rows.append(f"{first + len(rows)} {label} 1 {path}")
                draw(root / path)
        lines(root / f"Ebay_{half}.txt", header, *rows)


def inshop(root: Path, draw: Draw) -> None:
    rows = []
    for status, items, shots in (("train", (2, 7, 80), (1, 2)), ("query", (5, 6), (1,)), ("gallery", (5, 6), (2, 3))):
        for item in items:
            for shot in shots:
                name = f"img/WOMEN/Dresses/id_{item:08d}/0{shot}_1_front.jpg"
                rows.append(f"{name:<60} id_{item:08d} {status}")
                draw(root / "Img" / name)
    lines(root / "Eval" / "list_eval_partition.txt", str(len(rows)), "image_name item_id evaluation_status", *rows)


def vehicleid(root: Path, draw: Draw) -> None:
    names = {"train_list": (1, 2, 3), "test_list_800": (50, 51), "test_list_1600": (50, 51, 52), "test_list_2400": (53, 60)}
    for name, vehicles in names.items():
        rows = []
        for vehicle in vehicles:
            for shot in range(3):
                image = f"{vehicle * 10 + shot:07d}"
                rows.append(f"{image} {vehicle}")
                if not (root / "image" / f"{image}.jpg").exists():
                    draw(root / "image" / f"{image}.jpg")
        lines(root / "train_test_split" / f"{name}.txt", *rows)


def cub(root: Path, draw: Draw) -> None:
    species = {99: "099.Ovenbird", 100: "100.Brown_Pelican", 101: "101.White_Pelican", 102: "102.Western_Wood_Pewee"}
    images = [(label, shot) for label in species for shot in range(2)]
    for label, shot in images:
        draw(root / "images" / species[label] / f"bird_{shot}.jpg")
    lines(root / "classes.txt", *(f"{label} {name}" for label, name in species.items()))
    lines(root / "images.txt", *(f"{n} {species[label]}/bird_{shot}.jpg" for n, (label, shot) in enumerate(images, 1)))
    lines(root / "image_class_labels.txt", *(f"{n} {label}" for n, (label, _) in enumerate(images, 1)))


CARS = {96: "Dodge Charger Sedan 2012", 98: "Volvo 240 Sedan 1993", 99: "Acura RL Sedan 2012", 100: "FIAT 500 Abarth 2012"}


def cars(root: Path, draw: Draw) -> None:
    number = 0
    for label, name in CARS.items():
        for half in ("train", "train", "test"):
            number += 1
            draw(root / f"{label:03d}.{name}" / f"{half}_{number:06d}.jpg")


def struct(rows: list[dict[str, object]]) -> np.ndarray:
    """Rows as MATLAB's struct array."""
    table = np.empty((1, len(rows)), dtype=[(field, object) for field in rows[0]])
    for position, row in enumerate(rows):
        table[0, position] = tuple(row.values())
    return table


def class_names() -> np.ndarray:
    names = [CARS.get(label, f"Filler {label}") for label in range(1, 197)]
    cells = np.empty((1, 196), dtype=object)
    cells[0] = names
    return cells


def cars_annos(root: Path, draw: Draw) -> None:
    rows: list[dict[str, object]] = []
    for label in CARS:
        for test in (0, 1):
            path = f"car_ims/{len(rows) + 1:06d}.jpg"
            draw(root / path)
            box = {"bbox_x1": 1, "bbox_y1": 2, "bbox_x2": 9, "bbox_y2": 8}
            rows.append({"relative_im_path": path, **box, "class": label, "test": test})
    savemat(root / "cars_annos.mat", {"annotations": struct(rows), "class_names": class_names()})


def cars_devkit(root: Path, draw: Draw) -> None:
    (root / "devkit").mkdir()
    for half, name in (("cars_train", "cars_train_annos.mat"), ("cars_test", "cars_test_annos_withlabels.mat")):
        rows: list[dict[str, object]] = []
        for label in CARS:
            draw(root / half / f"{len(rows) + 1:05d}.jpg")
            rows.append({"bbox_x1": 1, "class": label, "fname": f"{len(rows) + 1:05d}.jpg"})
        savemat(root / "devkit" / name, {"annotations": struct(rows)})
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": class_names()})


def item(style: int, box: tuple[int, int, int, int] = (1, 2, 21, 18)) -> dict[str, object]:
    return {"style": style, "bounding_box": list(box), "category_id": 1, "landmarks": [1, 2, 2]}


def deepfashion2(root: Path, draw: Draw) -> None:
    halves = {
        "train": [("user", 1, [1, 0]), ("shop", 1, [1, 2]), ("user", 1, [2]), ("user", 2, [1]), ("shop", 2, [1])],
        "validation": [("user", 1, [1, 0]), ("user", 4, [2]), ("shop", 1, [0, 1]), ("shop", 4, [2, 0]), ("shop", 9, [3])],
    }
    for half, images in halves.items():
        for number, (source, pair, styles) in enumerate(images, start=1):
            draw(root / half / "image" / f"{number:06d}.jpg")
            items = {f"item{place}": item(style) for place, style in enumerate(styles, start=1)}
            annotation = {"source": source, "pair_id": pair, **items}
            lines(root / half / "annos" / f"{number:06d}.json", json.dumps(annotation))


def omniglot(root: Path, draw: Draw) -> None:
    for half, letters in (("images_background", ("Latin", "Greek")), ("images_evaluation", ("Angelic", "Tibetan"))):
        for place, alphabet in enumerate(letters):
            for character in ("character01", "character02"):
                for drawing in (1, 2, 3):
                    draw(root / half / alphabet / character / f"{place:04d}_{drawing:02d}.png")


MAKERS = {maker.__name__: maker for maker in (sop, inshop, vehicleid, cub, cars, deepfashion2, omniglot)}
MAKERS |= {maker.__name__: maker for maker in (cars_annos, cars_devkit)}


@pytest.fixture
def miniature(tmp_path: Path, draw: Draw) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        MAKERS[name](root, draw)
        return root

    return make
