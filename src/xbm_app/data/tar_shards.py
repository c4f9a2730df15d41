"""Tar shards as WebDataset writes them: the files of an image have one name, `000123.jpg` beside `000123.cls` or `.json`.

The headers of every shard are read once, into an index of where the images are. It is kept beside the shards, so that later
runs, and a resumed one, start at once. Nothing but the standard library's tarfile reads the format.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import IMAGE_SUFFIXES, Dataset, Row, encoded
from xbm_app.data.own_images import PARTS, Columns, dataset_of, split_by_class
from xbm_app.files import MALFORMED, read_arrays, replacing
from xbm_app.progress import track

INDEX = "xbm-index.npz"  # beside the shards
FORMAT = 1
SUFFIXES = IMAGE_SUFFIXES | {".ppm"}
PART = re.compile(r"(?:^|[-_./])(train|test|val|valid|validation|query|gallery)(?=[-_./]|\d|$)")
LONGEST_TEXT = 1 << 20  # bytes, of a .cls or .json file
PATH_SEPARATOR = "\n"  # in the index; no name within a shard may have one


@dataclass(frozen=True)
class Shards:
    """The images in some shards, by row: a `Source`.

    Attributes:
        root: the folder of the shards.
        names: of the shards, relative to `root`.
        shards, offsets, sizes, times: (N,) int64: the shard of each image, its first byte there, its bytes, and the
            modification time of the shard.
        paths: "SHARD/NAME" of each image.
        labels, groups: (N) text; a group is empty if the shards say none.
    """

    root: Path
    names: list[str]
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    times: np.ndarray
    paths: list[str]
    labels: list[str]
    groups: list[str]
    _open: dict[int, int] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def read(self, row: int) -> bytes:
        shard = int(self.shards[row])
        descriptor = self._open.get(shard)
        if descriptor is None:
            with self._lock:
                if shard not in self._open:
                    self._open[shard] = os.open(self.root / self.names[shard], os.O_RDONLY)
                descriptor = self._open[shard]
        return os.pread(descriptor, int(self.sizes[row]), int(self.offsets[row]))

    def __del__(self) -> None:
        for descriptor in self._open.values():
            with suppress(OSError):
                os.close(descriptor)


def shard_files(path: Path) -> list[Path]:
    """The tar files that a path names: itself, or those in a folder and in the folders below it."""
    if path.is_file():
        return [path] if path.suffix == ".tar" else []
    return sorted(file for pattern in ("*.tar", "*/*.tar") for file in path.glob(pattern) if not file.name.startswith("."))


def read_shards(path: str | Path, seed: int = 0, test_fraction: float = 0.5, columns: Columns = Columns()) -> Dataset:
    """Reads tar shards: a folder of them, or one file.

    The label of an image is its `.cls` file, or the field `columns.label` of its `.json` file; its group, such as a camera,
    the field `columns.group`. If the names of the shards say train and test, or train, query and gallery, that is the split.
    Otherwise a fraction of the classes is used for testing, as in `read_folder`.
    """
    files = shard_files(Path(path))
    if not files:
        raise InputError(f"{path} holds no tar shards: give a folder with files such as train-000.tar")
    root = Path(path) if Path(path).is_dir() else files[0].parent
    shards = _indexed(root, files, columns)
    rows = [
        Row(name, label, f"{root}/{name}", group=group)
        for name, label, group in zip(shards.paths, shards.labels, shards.groups)
    ]
    if not rows:
        raise InputError(f"{path}: the shards hold no images, such as 000123.jpg beside 000123.cls")
    row_of = {row.path: number for number, row in enumerate(rows)}
    if len(row_of) < len(rows):
        twice = next(row.path for number, row in enumerate(rows) if row_of[row.path] != number)
        raise InputError(f"{twice} occurs twice in its shard: write it again with one name per image")
    parts = [_part(name) for name in shards.names]
    if set(parts) in ({"train", "test"}, {"train", "query", "gallery"}):
        split: dict[str, list[Row]] = {part: [] for part in PARTS}
        for row, shard in zip(rows, shards.shards.tolist()):
            split[parts[shard]].append(row)
    elif set(parts) <= {"", "train"}:
        split = split_by_class(rows, seed, test_fraction, str(path))
    else:
        said = ", ".join(sorted({part or "none" for part in parts}))
        raise InputError(f"{path}: the names of the shards say {said}; name them train-… and test-…, or query-… and gallery-…")
    name = Path(path).resolve().stem
    return encoded(dataset_of(name, root, split, columns), shards, row_of)


def _part(name: str) -> str:
    found = PART.findall(name.removesuffix(".tar"))
    return str(found[0]) if found else ""


def _indexed(root: Path, files: Sequence[Path], columns: Columns) -> Shards:
    """The index in `root`, after reading the headers of the shards that are new or have changed."""
    stats = {file.relative_to(root).as_posix(): file.stat() for file in files}
    wanted: list[list[Any]] = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]
    key = [FORMAT, columns.label, columns.group]
    known = _read_index(root / INDEX, key)
    parts: dict[str, Any] = {}
    todo = [entry[0] for entry in wanted if entry not in known.get("shards", [])]
    if todo:
        for name in track(todo, "reading the headers of the shards", total=len(todo)):
            parts[name] = _scanned(root / name, columns)
    for entry in wanted:
        if entry[0] not in parts:
            parts[entry[0]] = _slice(known, known["shards"].index(entry))
    shards = _joined(root, parts, [entry[0] for entry in wanted], [entry[2] for entry in wanted])
    if todo or len(known["shards"]) != len(wanted):
        _write_index(root / INDEX, key, wanted, shards)
    return shards


Part = tuple[np.ndarray, np.ndarray, list[str], list[str], list[str]]  # offsets, sizes, names, labels, groups


def _joined(root: Path, parts: dict[str, Part], names: list[str], times: list[int]) -> Shards:
    counts = [len(parts[name][0]) for name in names]
    shards = np.repeat(np.arange(len(names)), counts)
    offsets, sizes = (np.concatenate([parts[name][k] for name in names]) for k in (0, 1))
    paths = [f"{name}/{inner}" for name in names for inner in parts[name][2]]
    labels, groups = ([text for name in names for text in parts[name][k]] for k in (3, 4))
    return Shards(root, names, shards, offsets, sizes, np.array(times, np.int64)[shards], paths, labels, groups)


def _scanned(file: Path, columns: Columns) -> Part:
    """Reads the headers of one shard, and its .cls and .json files."""
    offsets, sizes, names, labels, groups = [], [], list[str](), list[str](), list[str]()
    for key, members in _samples(file):
        image = next((suffix for suffix in members if f".{suffix}" in SUFFIXES), None)
        if image is None:
            continue
        where = f"{file}/{key}"
        if PATH_SEPARATOR in key:
            raise InputError(f"{where!r}: a name has a line break; rename it")
        label, group = _label(members, columns, where)
        offset, size = members[image]
        offsets.append(offset)
        sizes.append(size)
        names.append(f"{key}.{image}")
        labels.append(label)
        groups.append(group)
    return np.array(offsets, np.int64), np.array(sizes, np.int64), names, labels, groups


Member = Any  # (first byte, number of bytes); of .cls and .json files their contents


def _samples(file: Path) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yields the name without suffix, and the files by suffix, of each sample: consecutive files of one name."""
    key, members = "", dict[str, Member]()
    try:
        with tarfile.open(file, "r:") as archive, file.open("rb") as content:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every header
                if not member.isreg():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                name, suffix = f"{folder}/{stem}" if folder else stem, suffix.lower()
                if name != key and members:
                    yield key, members
                    members = {}
                key = name
                members.setdefault(suffix, (member.offset_data, member.size))
                if suffix in ("cls", "json"):
                    content.seek(member.offset_data)
                    members[suffix] = content.read(min(member.size, LONGEST_TEXT))
            if members:
                yield key, members
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{file} cannot be read as an uncompressed tar file ({error}): write it again") from None


def _label(members: dict[str, Member], columns: Columns, where: str) -> tuple[str, str]:
    """The label and the group of a sample, as text."""
    try:
        fields = json.loads(members["json"]) if "json" in members else {}
        text = members["cls"].decode().strip() if "cls" in members and columns.label == "label" else fields.get(columns.label)
        group = "" if columns.group is None else fields.get(columns.group, "")  # training images need none
    except (ValueError, AttributeError):
        raise InputError(f"{where}: its .cls or .json file cannot be read; write it again as UTF-8") from None
    if text is None or str(text).strip() == "":
        beside = ".cls file, or a .json file with" if columns.label == "label" else ".json file with"
        raise InputError(f"{where} has no label: add a {beside} the field {columns.label!r} (data.label)")
    return str(text), str(group)


# ---------------------------------------------------------------- the index


def _write_index(path: Path, key: list, entries: list, shards: Shards) -> None:
    """Keeps the index beside the shards; where that is not allowed, each run reads the headers again."""
    texts = {
        name: np.frombuffer(json.dumps(values).encode(), np.uint8)
        for name, values in (("key", key), ("entries", entries), ("labels", shards.labels), ("groups", shards.groups))
    }
    prefix = [len(name) + 1 for name in shards.names]
    inner = [path[prefix[shard]:] for path, shard in zip(shards.paths, shards.shards.tolist())]  # fmt: skip
    texts["inner"] = np.frombuffer(PATH_SEPARATOR.join(inner).encode(), np.uint8)
    with suppress(OSError, InputError), replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, shard=shards.shards, offset=shards.offsets, size=shards.sizes, **texts)  # type: ignore[arg-type]


def _read_index(path: Path, key: list) -> dict[str, Any]:
    """What `_write_index` wrote; without shards if there is none, or one of other fields, or a damaged one."""
    try:
        arrays = read_arrays(path)
        said, entries, labels, groups = (json.loads(arrays[n].tobytes()) for n in ("key", "entries", "labels", "groups"))
        inner = arrays["inner"].tobytes().decode().split(PATH_SEPARATOR)
        numbers = {name: arrays[name] for name in ("shard", "offset", "size")}
        if said == key and len({len(labels), len(groups), len(inner), *(len(each) for each in numbers.values())}) == 1:
            return {"shards": entries, "labels": labels, "groups": groups, "inner": inner, **numbers}
    except (OSError, *MALFORMED):
        pass
    return {"shards": []}


def _slice(index: dict[str, Any], number: int) -> Part:
    first, stop = np.searchsorted(index["shard"], [number, number + 1]).tolist()
    texts = (index[name][first:stop] for name in ("inner", "labels", "groups"))
    return (index["offset"][first:stop], index["size"][first:stop], *texts)
