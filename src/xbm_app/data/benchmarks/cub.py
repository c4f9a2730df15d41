"""CUB-200-2011: 200 bird species; the first 100 are for training, the others for testing. Boxes are not used."""

from pathlib import Path

from xbm.errors import InputError
from xbm_app.data.benchmarks.benchmark import Benchmark, Count, leave_one_out, read_lines, split_fields, whole_number
from xbm_app.data.images import Dataset, Row, inside

KS = (1, 2, 4, 8, 16, 32)
TRAIN_CLASSES = 100
COUNTS = {"train": Count(5_864, 100), "test": Count(5_924, 100)}


def read(root: Path) -> Dataset:
    """Reads images.txt, image_class_labels.txt and classes.txt (train_test_split.txt is for classification only)."""
    names = _classes(root / "classes.txt")
    paths = _numbered(root / "images.txt", "image_id image_name")
    train: list[Row] = []
    test: list[Row] = []
    for image, (text, where) in _numbered(root / "image_class_labels.txt", "image_id class_id").items():
        label = whole_number(text, "class_id", where)
        if label not in names or image not in paths:
            other = "classes.txt" if label not in names else "images.txt"
            raise InputError(f"{where}: names an id that {other} does not have; download both files again")
        path, place = paths.pop(image)
        half = train if label <= TRAIN_CLASSES else test
        half.append(Row("images/" + inside(path, place), names[label], where))
    if paths:
        path, place = next(iter(paths.values()))
        raise InputError(f"{place}: {path} has no label in image_class_labels.txt; download both files again")
    return leave_one_out("cub", root, train, test, KS)


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


def _classes(file: Path) -> dict[int, str]:
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
    ks=KS,
    paper=COUNTS,
    release=COUNTS,
    read=read,
)
