"""Stanford Online Products: 120,053 product photographs; each test image is searched among the other test images."""

from pathlib import Path

from xbm_app.data.benchmarks.benchmark import (
    Benchmark,
    Count,
    leave_one_out,
    read_lines,
    refuse_shared_classes,
    split_fields,
    whole_number,
)
from xbm_app.data.images import Dataset, Row, inside

KS = (1, 10, 100, 1000)
COLUMNS = "image_id class_id super_class_id path"
COUNTS = {"train": Count(59_551, 11_318), "test": Count(60_502, 11_316)}


def read(root: Path) -> Dataset:
    """Reads Ebay_train.txt and Ebay_test.txt. A class is one product."""
    train, test = (_rows(root / f"Ebay_{half}.txt") for half in ("train", "test"))
    refuse_shared_classes(train, test)
    return leave_one_out("sop", root, train, test, KS)


def _rows(file: Path) -> list[Row]:
    hint = "point --root at the folder that holds Ebay_train.txt and Ebay_test.txt"
    rows = []
    for where, line in read_lines(file, hint, skip=1):
        _, product, _, path = split_fields(line, COLUMNS, where)
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
    ks=KS,
    paper=COUNTS,
    release=COUNTS,
    read=read,
)
