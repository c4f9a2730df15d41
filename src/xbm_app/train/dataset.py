"""The data of a run: read, looked through, split and written down when the run begins; the same ever after."""

import hashlib
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from xbm.distributed import Ranks
from xbm.errors import InputError, unknown
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.store import Store, open_store
from xbm_app.train.config import Config, Data

SPLIT = "split.csv"  # in the folder of a run on own data
TABLES = (".csv", ".parquet")


def read_data(data: Data, split: Path | None = None) -> Dataset:
    """The data set a config names; own data as a `split` written before says, where there is one."""
    from xbm_app.data.benchmarks import BENCHMARKS, read_benchmark

    if data.name == "glyphs":
        from xbm_app.data.glyphs import read_glyphs

        return read_glyphs(size=data.resize)
    if data.name != "own" and data.name not in BENCHMARKS:
        raise unknown("data set", data.name, ["glyphs", "own", *BENCHMARKS])
    if data.root is None and data.store is not None:
        from xbm_app.data.store import read_stored

        return read_stored(Path(data.store))
    if data.root is None:
        option = "--data DIR" if data.name == "own" else "--root DIR"
        raise InputError(f"{data.name} needs to know where its images are: give {option} (data.root)")
    root = Path(data.root)
    if data.name != "own":
        return read_benchmark(data.name, root)
    from xbm_app.data.own_images import read_folder, read_table

    table = root.suffix.lower() in TABLES and not root.is_dir()
    if split is not None and split.exists():
        with warnings.catch_warnings(action="ignore"):  # of what is odd about the data was told when the run began
            parted = read_table(split, root.parent if table else root)
        return _renamed(parted, root.stem if table else root.resolve().name)
    return read_folder(root) if not table else read_table(root)


def _renamed(dataset: Dataset, name: str) -> Dataset:
    """The data set under the name of what it was read from, not of the file that holds its split."""

    def named(images: ImageSet) -> ImageSet:
        return replace(images, name=f"{name} {images.name.removeprefix(dataset.name + ' ')}")

    first = dataset.protocols[0]
    gallery = None if first.gallery is None else named(first.gallery)
    return Dataset(name, named(dataset.train), (replace(first, query=named(first.query), gallery=gallery),))


def begin_run(config: Config, folder: Path, ranks: Ranks | None = None) -> Dataset:
    """Reads the data of a new run and makes its folder; of several processes the first does, and the others wait.

    Own data is looked through before any training, and who trains and who is tested is written down as `split.csv`: the run
    goes by that, whatever comes to the data later.

    Raises:
        InputError: own data has problems and `data.skip_problems` does not say to leave them out.
    """
    if ranks is not None and not ranks.first:
        ranks.wait()
        return read_run(config, folder)
    dataset = read_data(config.data)
    if config.data.name == "own":
        from xbm_app.data.check import BROKEN, check_dataset, report, skip_problems
        from xbm_app.data.own_images import write_split

        problems = check_dataset(dataset)
        if problems:
            print(report(problems), file=sys.stderr)
        if config.data.skip_problems:
            dataset = skip_problems(dataset, problems)
        elif broken := [problem for problem in problems if problem.kind in BROKEN]:
            count = len({problem.text for problem in broken})
            are = "image is" if count == 1 else "images are"
            raise InputError(f"{count} {are} broken in {config.data.root}: mend them, or add --skip-problems")
        write_split(dataset, folder / SPLIT)
    folder.mkdir(parents=True, exist_ok=True)
    if ranks is not None:
        ranks.wait()
    return read_run(config, folder)


def read_run(config: Config, folder: Path) -> Dataset:
    """The data of a run as it was when the run began, less its held-out classes where some are asked for."""
    dataset = read_data(config.data, folder / SPLIT)
    if config.data.holdout:
        dataset = hold_out(dataset, config.data.holdout, config.data.fold)
    return replace(dataset, train=flip_labels(dataset.train, config.data.noise)) if config.data.noise else dataset


def hold_out(dataset: Dataset, share: float, fold: int = 0) -> Dataset:
    """Trains on some training classes and scores on the others: for choosing anything without a look at the test classes.

    A class belongs to the held-out part by a hash of its name, so that every run chooses on the same ones. Each
    `fold` holds out other classes.
    """
    train = dataset.train
    order = sorted(range(train.num_classes), key=lambda k: hashlib.sha256(str(train.class_names[k]).encode()).digest())
    count, classes = round(share * train.num_classes), train.num_classes
    if classes < 4:
        raise InputError(f"data.holdout needs two training classes on either side, and there are {classes}: set it to 0")
    if not 1 < count < classes - 1:
        better = max(0.2, math.ceil(200 / classes) / 100)
        raise InputError(f"data.holdout={share} of {classes} classes leaves too few on one side: try {better:g}")
    if (fold + 1) * count > classes:
        raise InputError(f"data.fold must be less than {classes // count} with data.holdout={share}, got {fold}")
    held = np.isin(train.labels, order[fold * count : (fold + 1) * count])
    ks = dataset.protocols[0].ks
    kept = train.select(np.flatnonzero(~held), f"{train.name} (less the held-out classes)")
    scored = train.select(np.flatnonzero(held), f"{train.name} (held-out classes)")
    return replace(dataset, train=kept, protocols=(Protocol("held-out", scored, ks),))


def flip_labels(images: ImageSet, share: float) -> ImageSet:
    """The images with some labels replaced by another class's: to see how much a method minds wrong ones.

    Which labels are wrong depends on nothing but their number, so that all methods and seeds have the same ones.
    """
    if not 0 <= share < 1:
        raise InputError(f"data.noise={share} is no share of the labels: give 0 or more, and less than 1")
    if share and images.num_classes < 2:
        raise InputError("data.noise gives images another class's label, and there is one class: set it to 0")
    draw = np.random.default_rng(0)
    wrong = draw.permutation(len(images))[: round(share * len(images))]
    labels = images.labels.copy()
    labels[wrong] = (labels[wrong] + draw.integers(1, images.num_classes, len(wrong))) % images.num_classes
    return replace(images, labels=labels)


def store_of(images: ImageSet, data: Data) -> Store:
    """The stored pixels of a set, or of a part of a stored set: held-out classes and broken images are left out.

    Labels are the images' own, which need not be those that were stored (`data.noise`).
    """
    return replace(_stored(images, data), labels=np.asarray(images.labels, np.int64))


def _stored(images: ImageSet, data: Data) -> Store:
    from xbm_app.data.store import StoredSet

    if isinstance(images, StoredSet) and images.store is not None:
        return images.store
    path = Path(data.store or "")
    if data.holdout or data.skip_problems or data.noise:
        from xbm_app.data.images import parts

        for whole in parts(read_data(data)).values():
            place = {key: position for position, key in enumerate(_keys(whole))}
            found = [place.get(key, -1) for key in _keys(images)]
            if found and -1 not in found:
                return open_store(path, whole).select(np.array(found))
    return open_store(path, images)


def _keys(images: ImageSet) -> list[tuple[str, object]]:
    boxes = [None] * len(images) if images.boxes is None else [tuple(box) for box in images.boxes.tolist()]
    return list(zip(images.paths or (), boxes))
