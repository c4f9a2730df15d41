"""The paper's six benchmarks and Omniglot, each read from the files of its official release."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xbm.errors import InputError, unknown
from xbm_app.data.benchmarks.benchmark import (
    Benchmark,
    Count,
    class_order,
    count,
    leave_one_out,
    query_gallery,
    read_lines,
    refuse_shared_classes,
    split_fields,
    whole_number,
)
from xbm_app.data.benchmarks.cars import CARS
from xbm_app.data.images import Dataset, Protocol, Row, image_set, inside, refuse_two_labels
from xbm_app.progress import track

__all__ = ["BENCHMARKS", "Benchmark", "Count", "count", "get_benchmark", "read_benchmark"]


def get_benchmark(name: str) -> Benchmark:
    """Returns the benchmark of that name; an unknown name is an error that suggests the nearest one."""
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def read_benchmark(name: str, root: str | Path) -> Dataset:
    """Reads a benchmark from the folder it was unpacked in.

    Example:
        >>> sorted(BENCHMARKS)
        ['cars', 'cub', 'deepfashion2', 'inshop', 'omniglot', 'sop', 'vehicleid']
    """
    benchmark, folder = get_benchmark(name), Path(root)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the one that {benchmark.title} was unpacked in")
    return benchmark.read(folder)


# ------------------------------------------------------------------ Stanford Online Products
# 120,053 product photographs; each test image is searched among the other test images.

SOP_KS = (1, 10, 100, 1000)
SOP_COLUMNS = "image_id class_id super_class_id path"
SOP_COUNTS = {"train": Count(59_551, 11_318), "test": Count(60_502, 11_316)}


def read_sop(root: Path) -> Dataset:
    """Reads Ebay_train.txt and Ebay_test.txt. A class is one product."""
    train, test = (_sop_rows(root / f"Ebay_{half}.txt") for half in ("train", "test"))
    refuse_shared_classes(train, test)
    return leave_one_out("sop", root, train, test, SOP_KS)


def _sop_rows(file: Path) -> list[Row]:
    hint = "point --root at the folder that holds Ebay_train.txt and Ebay_test.txt"
    rows = []
    for where, line in read_lines(file, hint, skip=1):
        _, product, _, path = split_fields(line, SOP_COLUMNS, where)
        rows.append(Row(inside(path, where), str(whole_number(product, "class_id", where)), where))
    return rows


SOP = Benchmark(
    name="sop",
    title="Stanford Online Products",
    source="Song et al., CVPR 2016: https://cvgl.stanford.edu/projects/lifted_struct/",
    terms="photographs from eBay listings, for research",
    layout=(
        "Ebay_train.txt, Ebay_test.txt   a header, then `image_id class_id super_class_id path`\n"
        "bicycle_final/*.JPG ...         the images, one folder per product group"
    ),
    ks=SOP_KS,
    paper=SOP_COUNTS,
    release=SOP_COUNTS,
    read=read_sop,
)


# ------------------------------------------------------------------ In-shop Clothes Retrieval (DeepFashion)
# Images of clothes are searched in a gallery from the same shops.

INSHOP_KS = (1, 10, 20, 30, 40, 50)
INSHOP_LIST = "list_eval_partition.txt"
INSHOP_COLUMNS = "image_name item_id evaluation_status"
INSHOP_COUNTS = {"train": Count(25_882, 3_997), "query": Count(14_218, 3_985), "gallery": Count(12_612, 3_985)}


def read_inshop(root: Path) -> Dataset:
    """Reads list_eval_partition.txt. A class is one item of clothing."""
    places = [root / folder / INSHOP_LIST for folder in ("Eval", "Anno", "")]
    file = next((place for place in places if place.is_file()), places[0])
    parts = _inshop_parts(file, "Img/" if (root / "Img" / "img").is_dir() else "")
    train, query, gallery = (parts[status] for status in ("train", "query", "gallery"))
    refuse_shared_classes(train, query + gallery)
    refuse_two_labels(train + query + gallery)
    _refuse_lost_queries(query, gallery)
    return query_gallery("inshop", root, train, query, gallery, class_order(gallery), INSHOP_KS)


def _inshop_parts(file: Path, prefix: str) -> dict[str, list[Row]]:
    hint = "point --root at the folder that holds Eval/list_eval_partition.txt"
    parts: dict[str, list[Row]] = {"train": [], "query": [], "gallery": []}
    lines = list(read_lines(file, hint))
    if not lines:
        raise InputError(f"{file} is empty: download it again from the data's owner")
    promised = whole_number(lines[0][1], "the number of images", lines[0][0])
    for where, line in lines[2:]:
        name, item, status = split_fields(line, INSHOP_COLUMNS, where)
        if status not in parts:
            raise InputError(f"{where}: {unknown('evaluation_status', status, parts)}")
        parts[status].append(Row(inside(prefix + inside(name, where), where), item, where))
    if promised != len(lines) - 2:
        raise InputError(
            f"{lines[0][0]}: promises {promised:,} rows but {len(lines) - 2:,} follow; the file is truncated, download it again"
        )
    return parts


def _refuse_lost_queries(query: list[Row], gallery: list[Row]) -> None:
    labels = {row.label for row in gallery}
    for row in query:
        if row.label not in labels:
            raise InputError(f"{row.where}: no gallery image shows query item {row.label!r}; download the list again")


INSHOP = Benchmark(
    name="inshop",
    title="In-shop Clothes Retrieval (DeepFashion)",
    source="Liu et al., CVPR 2016: https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    terms="non-commercial research and education, on signed request",
    layout=(
        "Eval/list_eval_partition.txt    the number of rows, a header, then `image_name item_id evaluation_status`\n"
        "                                (also found in Anno/ or at the root)\n"
        "Img/img/WOMEN/...               the images (or img/WOMEN/...)"
    ),
    ks=INSHOP_KS,
    paper=INSHOP_COUNTS,
    release=INSHOP_COUNTS,
    read=read_inshop,
)


# ------------------------------------------------------------------ PKU VehicleID
# Cars in images of street cameras; three test sets, each scored in two ways.

VEHICLEID_KS = (1, 5)
VEHICLEID_COLUMNS = "image_id vehicle_id"
VEHICLEID_SIZES = {"small": 800, "medium": 1600, "large": 2400}
REPEATS = 10  # random galleries of one image per vehicle, whose scores are averaged


def read_vehicleid(root: Path) -> Dataset:
    """Reads the lists in train_test_split/. A class is one vehicle.

    Each test set is scored twice: each image against all others ("leave-one-out"), and against ten random galleries of one
    image per vehicle ("one-per-class"). The paper does not say which it used, so both are reported.
    """
    train = _vehicleid_rows(root, "train_list.txt")
    refuse_two_labels(train)
    protocols = []
    for size, vehicles in VEHICLEID_SIZES.items():
        rows = _vehicleid_rows(root, f"test_list_{vehicles}.txt")
        refuse_shared_classes(train, rows)
        refuse_two_labels(rows)
        images = image_set(f"vehicleid {size}", root, rows, class_order(rows))
        protocols.append(Protocol(f"{size} leave-one-out", images, VEHICLEID_KS))
        protocols.append(Protocol(f"{size} one-per-class", images, VEHICLEID_KS, one_per_class=REPEATS))
    return Dataset("vehicleid", image_set("vehicleid train", root, train, class_order(train)), tuple(protocols))


def _vehicleid_rows(root: Path, name: str) -> list[Row]:
    hint = "point --root at the folder that holds train_test_split/ and image/"
    rows = []
    for where, line in read_lines(root / "train_test_split" / name, hint):
        image, vehicle = split_fields(line, VEHICLEID_COLUMNS, where)
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
    ks=VEHICLEID_KS,
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
    read=read_vehicleid,
)


# ------------------------------------------------------------------ CUB-200-2011
# 200 bird species; the first 100 are for training, the others for testing. Boxes are not used.

CUB_KS = (1, 2, 4, 8, 16, 32)
CUB_TRAIN_CLASSES = 100
CUB_COUNTS = {"train": Count(5_864, 100), "test": Count(5_924, 100)}


def read_cub(root: Path) -> Dataset:
    """Reads images.txt, image_class_labels.txt and classes.txt (train_test_split.txt is for classification only)."""
    names = _cub_classes(root / "classes.txt")
    paths = _numbered(root / "images.txt", "image_id image_name")
    train: list[Row] = []
    test: list[Row] = []
    for image, (text, where) in _numbered(root / "image_class_labels.txt", "image_id class_id").items():
        label = whole_number(text, "class_id", where)
        if label not in names or image not in paths:
            other = "classes.txt" if label not in names else "images.txt"
            raise InputError(f"{where}: names an id that {other} does not have; download both files again")
        path, place = paths.pop(image)
        half = train if label <= CUB_TRAIN_CLASSES else test
        half.append(Row("images/" + inside(path, place), names[label], where))
    if paths:
        path, place = next(iter(paths.values()))
        raise InputError(f"{place}: {path} has no label in image_class_labels.txt; download both files again")
    return leave_one_out("cub", root, train, test, CUB_KS)


def _numbered(file: Path, columns: str) -> dict[int, tuple[str, str]]:
    """Reads (text, where) of each line by its id; an id that occurs twice is an error."""
    hint = "point --root at the folder that holds images.txt (CUB_200_2011)"
    rows: dict[int, tuple[str, str]] = {}
    for where, line in read_lines(file, hint):
        number, text = split_fields(line, columns, where)
        identity = whole_number(number, columns.split()[0], where)
        if identity in rows:
            raise InputError(f"{where}: id {identity} is already in {rows[identity][1]}; download the file again")
        rows[identity] = (text, where)
    return rows


def _cub_classes(file: Path) -> dict[int, str]:
    rows = _numbered(file, "class_id class_name")
    places: dict[str, str] = {}
    for name, where in rows.values():
        if places.setdefault(name, where) != where:
            raise InputError(f"{where}: class {name!r} is already in {places[name]}; download the file again")
    return {number: name for number, (name, _) in rows.items()}


CUB = Benchmark(
    name="cub",
    title="CUB-200-2011",
    source="Wah et al., Caltech 2011: https://www.vision.caltech.edu/datasets/cub_200_2011/",
    terms="non-commercial research and education; the photographs belong to their authors",
    layout=(
        "images.txt                  `image_id image_name`\n"
        "image_class_labels.txt      `image_id class_id`\n"
        "classes.txt                 `class_id class_name`\n"
        "images/NNN.Species/*.jpg    the images"
    ),
    ks=CUB_KS,
    paper=CUB_COUNTS,
    release=CUB_COUNTS,
    read=read_cub,
)


# ------------------------------------------------------------------ DeepFashion2
# Clothes in users' photographs are searched among the items in shop images, with ground-truth boxes.
#
# As in the official evaluation, the queries are the items of user images with a style above 0. The gallery is every item of
# the shop images, including those of style 0, which match no query but can be retrieved by mistake. An item matches if both
# pair_id and style agree. The labels of the test set are not public, so the validation set is used.

DEEPFASHION2_KS = (1, 10, 20)


def read_deepfashion2(root: Path) -> Dataset:
    """Reads train/annos and validation/annos. A class is one style of one pair of shop and user images."""
    train = [row for _, style, row in _deepfashion2_items(root, "train") if style > 0]
    tested = list(_deepfashion2_items(root, "validation"))
    query = [row for source, style, row in tested if source == "user" and style > 0]
    gallery = [row for source, _, row in tested if source == "shop"]
    return query_gallery("deepfashion2", root, train, query, gallery, class_order(query + gallery), DEEPFASHION2_KS)


def _deepfashion2_items(root: Path, half: str) -> Iterator[tuple[str, int, Row]]:
    """Yields (source, style, row) of every item, image by image."""
    folder = root / half / "annos"
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(f"{folder} holds no annotations: point --root at the folder that holds train/ and validation/")
    for file in track(files, f"reading {half} annotations"):
        image = _deepfashion2_annotation(file)
        source, pair = image.get("source"), image.get("pair_id")
        if source not in ("user", "shop"):
            raise InputError(f"{file}: {unknown('source', source, ('user', 'shop'))}")
        for key in sorted(key for key in image if key.startswith("item")):
            item = image[key]
            if not isinstance(pair, int) or not isinstance(item, dict) or not isinstance(item.get("style"), int):
                raise InputError(f"{file}: {key} needs a whole-number style and its image a whole-number pair_id")
            style = item["style"]
            label = f"{half}, pair {pair}, style {style}" if style > 0 else f"{half}, unpaired"
            yield source, style, Row(f"{half}/image/{file.stem}.jpg", label, str(file), _box(item, key, file))


def _deepfashion2_annotation(file: Path) -> dict[str, Any]:
    try:
        image = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is no readable JSON ({error}): download it again from the data's owner") from None
    if not isinstance(image, dict):
        raise InputError(f"{file} is not the annotation of an image: download it again from the data's owner")
    return image


def _box(item: dict[str, Any], key: str, file: Path) -> tuple[int, int, int, int]:
    try:
        left, top, right, bottom = (int(edge) for edge in item["bounding_box"])
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{file}: {key} needs a bounding_box of four numbers") from None
    return left, top, right, bottom


DEEPFASHION2 = Benchmark(
    name="deepfashion2",
    title="DeepFashion2, consumer-to-shop retrieval",
    source="Ge et al., CVPR 2019: https://github.com/switchablenorms/DeepFashion2",
    terms="non-commercial research and education; a form gives the password of the archives",
    layout=(
        "train/annos/NNNNNN.json        source, pair_id, item1, item2, ... with style and bounding_box\n"
        "train/image/NNNNNN.jpg         the images\n"
        "validation/annos, validation/image   the same; user items are queries, shop items the gallery"
    ),
    ks=DEEPFASHION2_KS,
    paper={"query": Count(10_990, items=32_550), "gallery": Count(21_438, items=37_183)},
    release={"query": Count(10_844, items=12_377), "gallery": Count(21_309, items=36_961)},
    read=read_deepfashion2,
)


# ------------------------------------------------------------------ Omniglot
# Handwritten characters, 20 drawings each; "background" is for training, "evaluation" for testing.

OMNIGLOT_KS = (1, 2, 4, 8)
DRAWINGS = 20
OMNIGLOT_LAYOUTS = (
    ("images_background", "images_evaluation"),
    ("python/images_background", "python/images_evaluation"),
    ("train", "test"),
)


def read_omniglot(root: Path) -> Dataset:
    """Reads alphabet/character folders, or one folder per character. A class is one character."""
    halves = next((halves for halves in OMNIGLOT_LAYOUTS if all((root / half).is_dir() for half in halves)), None)
    if halves is None:
        raise InputError(
            f"{root} holds neither images_background/ and images_evaluation/ nor train/ and test/: point --root at "
            "the folder that does"
        )
    train, test = (_omniglot_rows(root, half) for half in halves)
    return leave_one_out("omniglot", root, train, test, OMNIGLOT_KS)


def _omniglot_rows(root: Path, half: str) -> list[Row]:
    rows = []
    for file in sorted((root / half).rglob("*.png")):
        character = file.parent.relative_to(root / half).as_posix()
        if not file.name.startswith(".") and character != ".":
            rows.append(Row(file.relative_to(root).as_posix(), character, str(file)))
    return rows


def missing_drawings(dataset: Dataset) -> list[str]:
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
    ks=OMNIGLOT_KS,
    paper={},
    release={"train": Count(19_280, 964), "test": Count(13_180, 659)},
    read=read_omniglot,
    missing=missing_drawings,
    redistributable=True,
)


# ------------------------------------------------------------------ all of them

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (SOP, INSHOP, VEHICLEID, CUB, CARS, DEEPFASHION2, OMNIGLOT)
}
