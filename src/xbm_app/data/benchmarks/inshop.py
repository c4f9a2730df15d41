"""In-shop Clothes Retrieval (DeepFashion): images of clothes are searched in a gallery from the same shops."""

from pathlib import Path

from xbm.errors import InputError, unknown
from xbm_app.data.benchmarks.benchmark import (
    Benchmark,
    Count,
    class_order,
    query_gallery,
    read_lines,
    refuse_shared_classes,
    split_fields,
    whole_number,
)
from xbm_app.data.images import Dataset, Row, inside, refuse_two_labels

KS = (1, 10, 20, 30, 40, 50)
LIST = "list_eval_partition.txt"
COLUMNS = "image_name item_id evaluation_status"
COUNTS = {"train": Count(25_882, 3_997), "query": Count(14_218, 3_985), "gallery": Count(12_612, 3_985)}


def read(root: Path) -> Dataset:
    """Reads list_eval_partition.txt. A class is one item of clothing."""
    places = [root / folder / LIST for folder in ("Eval", "Anno", "")]
    file = next((place for place in places if place.is_file()), places[0])
    parts = _parts(file, "Img/" if (root / "Img" / "img").is_dir() else "")
    train, query, gallery = (parts[status] for status in ("train", "query", "gallery"))
    refuse_shared_classes(train, query + gallery)
    refuse_two_labels(train + query + gallery)
    _refuse_lost_queries(query, gallery)
    return query_gallery("inshop", root, train, query, gallery, class_order(gallery), KS)


def _parts(file: Path, prefix: str) -> dict[str, list[Row]]:
    hint = "point --root at the folder that holds Eval/list_eval_partition.txt"
    parts: dict[str, list[Row]] = {"train": [], "query": [], "gallery": []}
    lines = list(read_lines(file, hint))
    if not lines:
        raise InputError(f"{file} is empty: download it again from the data's owner")
    promised = whole_number(lines[0][1], "the number of images", lines[0][0])
    for where, line in lines[2:]:
        name, item, status = split_fields(line, COLUMNS, where)
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
    ks=KS,
    paper=COUNTS,
    release=COUNTS,
    read=read,
)
