"""A folder made by `xbm prepare` as a data set of its own: for machines that have the store and not the image files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.check import parts
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.manifest import read_manifest
from xbm_app.data.store import Store, open_store

OUTLINE = "dataset.json"  # which stores the folder holds, and how they are scored


@dataclass(frozen=True, eq=False)
class StoredSet(ImageSet):
    """Images whose pixels come from a store, resized as they are there."""

    store: Store | None = None

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        assert self.store is not None
        return Image.fromarray(self.store.view(index))

    def select(self, indices: np.ndarray, name: str | None = None) -> "StoredSet":
        assert self.store is not None
        chosen = super().select(indices, name)
        return replace(chosen, store=self.store.select(np.asarray(indices)))  # type: ignore[call-arg, return-value]


def folder_of(part: str) -> str:
    """The name of the folder that holds the store of one set."""
    return part.replace(" ", "-")


def write_outline(dataset: Dataset, out: Path) -> None:
    """Notes beside the stores what the stores cannot tell: names of classes, and who is searched for whom."""
    sets = parts(dataset)
    names = {id(images): part for part, images in sets.items()}
    outline = {
        "name": dataset.name,
        "sets": {part: {"name": images.name, "classes": [str(c) for c in images.class_names]} for part, images in sets.items()},
        "protocols": [
            {
                "name": protocol.name,
                "query": names[id(protocol.query)],
                "gallery": None if protocol.gallery is None else names[id(protocol.gallery)],
                "ks": list(protocol.ks),
                "one_per_class": protocol.one_per_class,
            }
            for protocol in dataset.protocols
        ],
    }
    (out / OUTLINE).write_text(json.dumps(outline, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_stored(path: Path) -> Dataset:
    """The data set that a folder of stores was made from, its images read from the stores.

    Raises:
        InputError: the folder is not one that `xbm prepare` finished.
    """
    try:
        outline = json.loads((path / OUTLINE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path} holds no {OUTLINE}: make it with `xbm prepare NAME --root DIR --out {path}`") from None
    sets = {}
    for part, told in outline["sets"].items():
        folder = path / folder_of(part)
        manifest, store = read_manifest(folder), open_store(folder, None)
        sets[part] = StoredSet(
            told["name"],
            store.labels,
            told["classes"],
            root=path,
            paths=manifest.paths or [f"{part}/{index}" for index in range(len(store))],
            boxes=None if manifest.boxes is None else np.array(manifest.boxes, np.int64),
            store=store,
        )
    protocols = tuple(
        Protocol(p["name"], sets[p["query"]], tuple(p["ks"]), sets[p["gallery"]] if p["gallery"] else None, p["one_per_class"])
        for p in outline["protocols"]
    )
    return Dataset(outline["name"], sets["train"], protocols)
