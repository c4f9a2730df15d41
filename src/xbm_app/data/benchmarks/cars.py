"""Cars-196: car models; the first 98 in the official order are for training, the others for testing. Boxes are not used.

The official order is not alphabetical (class 6, an Acura Integra, follows four Acuras that sort after it), so it is read
from a .mat file or from indices in the folder names, never from sorted names.
"""

import re
import zlib
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xbm.errors import DamagedFileError, InputError
from xbm_app.data.benchmarks.benchmark import Benchmark, Count
from xbm_app.data.images import IMAGE_SUFFIXES, Dataset, Protocol, Row, image_set, inside, refuse_two_labels

KS = (1, 2, 4, 8, 16, 32)
CLASSES, TRAIN_CLASSES, IMAGES = 196, 98, 16_185
COUNTS = {"train": Count(8_054, 98), "test": Count(8_131, 98)}
DEVKIT = ("", "devkit")  # the .mat files are found at the root or in devkit/


def read(root: Path) -> Dataset:
    """Reads car_ims/ by cars_annos.mat, cars_train/ and cars_test/ by the devkit, or class folders with their index."""
    if (root / "car_ims").is_dir():
        numbered = _from_annotations(root)
    elif (root / "cars_train").is_dir():
        numbered = _from_devkit(root)
    else:
        numbered = _from_folders(root)
    order = sorted({(number, row.label) for number, row in numbered})
    refuse_two_labels([row for _, row in numbered])
    half = {"train": range(1, TRAIN_CLASSES + 1), "test": range(TRAIN_CLASSES + 1, CLASSES + 1)}
    train, test = (
        image_set(
            f"cars {name}",
            root,
            [row for number, row in numbered if number in numbers],
            [label for number, label in order if number in numbers],
        )
        for name, numbers in half.items()
    )
    return Dataset("cars", train, (Protocol("test", test, KS),))


def _from_annotations(root: Path) -> list[tuple[int, Row]]:
    file = root / "cars_annos.mat"
    mat = _load(file)
    return list(_annotated(file, mat, "relative_im_path", "", _names(file, mat)))


def _from_devkit(root: Path) -> list[tuple[int, Row]]:
    names = _official_names(root)
    if names is None:
        raise InputError(f"{root}/devkit/cars_meta.mat is missing: it names the classes; put the owners' devkit there")
    rows: list[tuple[int, Row]] = []
    for half, labelled in (("cars_train", "cars_train_annos.mat"), ("cars_test", "cars_test_annos_withlabels.mat")):
        file = _find(root, labelled)
        if file is None:
            raise InputError(
                f"{root}/devkit/{labelled} is missing: the half of each class that lies in {half}/ has no labels "
                "without it; get it from the data's owner"
            )
        folder = f"{half}/{half}" if (root / half / half).is_dir() else half
        rows.extend(_annotated(file, _load(file), "fname", f"{folder}/", names))
    return rows


def _from_folders(root: Path) -> list[tuple[int, Row]]:
    folders = list(_class_folders(root))
    if not folders:
        raise InputError(f"{root} holds none of the layouts of Cars-196: see `xbm datasets` for the three it may have")
    official = _official_names(root)
    key = {_letters(name): number for number, name in enumerate(official or [], start=1)}
    names: dict[int, str] = {}
    rows: list[tuple[int, Row]] = []
    for folder in folders:
        indexed = re.fullmatch(r"(\d{1,3})\.(.+)", folder.name)
        number = int(indexed[1]) if indexed else key.get(_letters(folder.name))
        if number is None:
            raise InputError(
                f"{folder}: the number of this class is unknown, and the official order is not alphabetical; "
                "put cars_annos.mat or devkit/cars_meta.mat at the root, or name the folder NNN.class name"
            )
        name = indexed[2] if indexed else folder.name
        if not 1 <= number <= CLASSES or names.setdefault(number, name) != name:
            clash = f"class {number} is also {names[number]!r}" if number in names else "classes run from 1 to 196"
            raise InputError(f"{folder}: {clash}; give each class the index the owners gave it")
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith("."):
                rows.append((number, Row(file.relative_to(root).as_posix(), name, str(file))))
    _refuse_same_name(names, str(root))
    return rows


def _class_folders(root: Path) -> Iterator[Path]:
    halves = [root / "train", root / "test"]
    for base in halves if all(half.is_dir() for half in halves) else [root]:
        if base.is_dir():
            yield from (
                folder
                for folder in sorted(base.iterdir())
                if folder.is_dir() and folder.name != "devkit" and not folder.name.startswith((".", "__"))
            )


def _letters(name: str) -> str:
    """Removes what file systems change in a class name: `Ram C/V` and `Ram C-V` are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _find(root: Path, name: str) -> Path | None:
    return next((root / folder / name for folder in DEVKIT if (root / folder / name).is_file()), None)


def _official_names(root: Path) -> list[str] | None:
    for name in ("cars_meta.mat", "cars_annos.mat"):
        file = _find(root, name)
        if file is not None:
            return _names(file, _load(file))
    return None


def _load(file: Path) -> dict[str, np.ndarray]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if not file.is_file():
        raise InputError(f"{file} is missing: it holds the labels; get it from the data's owner")
    try:
        return dict(loadmat(str(file), squeeze_me=True))
    # scipy raises all of these on damaged files, and NotImplementedError for another version of the format
    except (MatReadError, OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError, zlib.error) as error:
        raise DamagedFileError(
            file, f"{file} is no readable .mat file ({error}): download it again from the data's owner"
        ) from None


def _names(file: Path, mat: dict[str, np.ndarray]) -> list[str]:
    if "class_names" not in mat:
        raise InputError(f"{file} has no `class_names`: download it again from the data's owner")
    names = [str(name) for name in np.atleast_1d(mat["class_names"])]
    _refuse_same_name(dict(enumerate(names, start=1)), str(file))
    return names


def _refuse_same_name(names: dict[int, str], where: str) -> None:
    first: dict[str, int] = {}
    for number, name in names.items():
        if first.setdefault(name, number) != number:
            raise InputError(f"{where}: classes {first[name]} and {number} are both named {name!r}; rename one of them")


def _annotated(file: Path, mat: dict[str, np.ndarray], field: str, prefix: str, names: list[str]) -> Iterator[tuple[int, Row]]:
    table = np.atleast_1d(mat.get("annotations", np.empty(0)))
    if table.dtype.names is None or field not in table.dtype.names or "class" not in table.dtype.names:
        raise InputError(f"{file} has no `annotations` with {field} and class: download it again from the data's owner")
    for position, (path, number) in enumerate(zip(table[field], table["class"]), start=1):
        where = f"{file}, annotation {position}"
        if not 1 <= int(number) <= len(names):
            raise InputError(f"{where}: class {number} has no name among the {len(names)} there are; download it again")
        yield int(number), Row(inside(prefix + inside(str(path), where), where), names[int(number) - 1], where)


def missing(dataset: Dataset, total: int = IMAGES) -> list[str]:
    """Names the images that are missing in a folder of class folders, from gaps in their numbering.

    Files named {train,test}_NNNNNN contain the official number of the image among all 16,185. The images of a class are
    numbered consecutively, so the neighbors of a gap tell its folder. With other file names, missing images are unknown.
    """
    stems: dict[int, str] = {}
    for images in (dataset.train, dataset.protocols[0].query):
        for path in images.paths or ():
            match = re.fullmatch(r"(.*(?:train|test)_)(\d{6})\.\w+", path)
            if match is None:
                return []
            stems[int(match[2])] = match[1]
    present = sorted(stems)
    lost = []
    for number in range(1, total + 1):
        if number not in stems:
            after = bisect(present, number)
            beside = {stems[present[position]] for position in (after - 1, after) if 0 <= position < len(present)}
            lost.append(" or ".join(f"{stem}{number:06d}" for stem in sorted(beside)))
    return lost


CARS = Benchmark(
    name="cars",
    title="Cars-196 (Stanford Cars)",
    source="Krause et al., 3dRR 2013, Stanford AI Lab: https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
    terms="non-commercial research",
    layout=(
        "one of\n"
        "  cars_annos.mat, car_ims/NNNNNN.jpg\n"
        "  cars_train/, cars_test/, devkit/{cars_meta,cars_train_annos,cars_test_annos_withlabels}.mat\n"
        "  NNN.class name/*, one folder per class, NNN = 1 to 196 in the official order (not alphabetical);\n"
        "  without NNN when cars_annos.mat or devkit/cars_meta.mat is there too"
    ),
    ks=KS,
    paper=COUNTS,
    release=COUNTS,
    read=read,
    missing=missing,
)
