"""DeepFashion2: clothes in users' photographs are searched among the items in shop images, with ground-truth boxes.

As in the official evaluation, the queries are the items of user images with a style above 0. The gallery is every item of the
shop images, including those of style 0, which match no query but can be retrieved by mistake. An item matches if both pair_id
and style agree. The labels of the test set are not public, so the validation set is used.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xbm.errors import InputError, unknown
from xbm_app.data.benchmarks.benchmark import Benchmark, Count, class_order, query_gallery
from xbm_app.data.images import Dataset, Row
from xbm_app.progress import track

KS = (1, 10, 20)


def read(root: Path) -> Dataset:
    """Reads train/annos and validation/annos. A class is one style of one pair of shop and user images."""
    train = [row for _, style, row in _items(root, "train") if style > 0]
    tested = list(_items(root, "validation"))
    query = [row for source, style, row in tested if source == "user" and style > 0]
    gallery = [row for source, _, row in tested if source == "shop"]
    return query_gallery("deepfashion2", root, train, query, gallery, class_order(query + gallery), KS)


def _items(root: Path, half: str) -> Iterator[tuple[str, int, Row]]:
    """Yields (source, style, row) of every item, image by image."""
    folder = root / half / "annos"
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(f"{folder} holds no annotations: point --root at the folder that holds train/ and validation/")
    for file in track(files, f"reading {half} annotations"):
        image = _load(file)
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


def _load(file: Path) -> dict[str, Any]:
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
    ks=KS,
    paper={"query": Count(10_990, items=32_550), "gallery": Count(21_438, items=37_183)},
    release={"query": Count(10_844, items=12_377), "gallery": Count(21_309, items=36_961)},
    read=read,
)
