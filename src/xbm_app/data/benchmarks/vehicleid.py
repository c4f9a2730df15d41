"""PKU VehicleID: cars in images of street cameras; three test sets, each scored in two ways."""

from pathlib import Path

from xbm_app.data.benchmarks.benchmark import (
    Benchmark,
    Count,
    class_order,
    read_lines,
    refuse_shared_classes,
    split_fields,
    whole_number,
)
from xbm_app.data.images import Dataset, Protocol, Row, image_set, inside, refuse_two_labels

KS = (1, 5)
COLUMNS = "image_id vehicle_id"
SIZES = {"small": 800, "medium": 1600, "large": 2400}
REPEATS = 10  # random galleries of one image per vehicle, whose scores are averaged


def read(root: Path) -> Dataset:
    """Reads the lists in train_test_split/. A class is one vehicle.

    Each test set is scored twice: each image against all others ("leave-one-out"), and against ten random galleries of one
    image per vehicle ("one-per-class"). The paper does not say which it used, so both are reported.
    """
    train = _rows(root, "train_list.txt")
    refuse_two_labels(train)
    protocols = []
    for size, vehicles in SIZES.items():
        rows = _rows(root, f"test_list_{vehicles}.txt")
        refuse_shared_classes(train, rows)
        refuse_two_labels(rows)
        images = image_set(f"vehicleid {size}", root, rows, class_order(rows))
        protocols.append(Protocol(f"{size} leave-one-out", images, KS))
        protocols.append(Protocol(f"{size} one-per-class", images, KS, one_per_class=REPEATS))
    return Dataset("vehicleid", image_set("vehicleid train", root, train, class_order(train)), tuple(protocols))


def _rows(root: Path, name: str) -> list[Row]:
    hint = "point --root at the folder that holds train_test_split/ and image/"
    rows = []
    for where, line in read_lines(root / "train_test_split" / name, hint):
        image, vehicle = split_fields(line, COLUMNS, where)
        path = inside(f"image/{inside(image, where)}.jpg", where)
        rows.append(Row(path, str(whole_number(vehicle, "vehicle_id", where)), where))
    return rows


VEHICLEID = Benchmark(
    name="vehicleid",
    title="PKU VehicleID",
    source="Liu et al., CVPR 2016: https://www.pkuml.org/resources/pku-vehicleid.html",
    terms="research only, on signed request",
    layout=(
        "train_test_split/train_list.txt            `image_id vehicle_id`, no header\n"
        "train_test_split/test_list_800.txt         the same; also test_list_1600.txt, test_list_2400.txt\n"
        "image/*.jpg                                the images, named by image_id"
    ),
    ks=KS,
    paper={
        "train": Count(110_178, 13_134),
        "small": Count(7_332, 800),
        "medium": Count(12_995, 1_600),
        "large": Count(20_038, 2_400),
    },
    release={
        "train": Count(113_346, 13_164),
        "small": Count(6_493, 800),
        "medium": Count(13_377, 1_600),
        "large": Count(19_777, 2_400),
    },
    read=read,
)
