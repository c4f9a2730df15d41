"""Your own data, whatever it is: which reader a folder, a table, tar shards or a data set of Hugging Face needs."""

import os
from pathlib import Path

from xbm.errors import InputError
from xbm_app.data.hub_datasets import PREFIX, has_images, read_hub
from xbm_app.data.images import Dataset
from xbm_app.data.own_images import Columns, read_folder, read_table
from xbm_app.data.tar_shards import read_shards, shard_files

TABLES = (".csv", ".parquet")


def read_own(root: str, columns: Columns = Columns()) -> Dataset:
    """Reads a folder of class folders, a table, tar shards, a Parquet file with images in it, or hf:NAME."""
    if root.startswith(PREFIX):
        return read_hub(root.removeprefix(PREFIX), columns=columns)
    path = Path(root)
    if shard_files(path):
        return read_shards(path, columns=columns)
    if path.suffix.lower() == ".parquet" and path.is_file() and has_images(path):
        return read_hub(root, columns=columns)
    if is_table(path):
        return read_table(path, columns=columns)
    if columns != Columns():
        raise InputError(f"{root} has no columns, its folders are the classes: omit data.label, split and exclude_same")
    return read_folder(path)


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES and not path.is_dir()


def whole_path(root: str | Path) -> str:
    """The same data for a program that runs elsewhere: a path from the root of the disk; names on a hub stay.

    Example:
        >>> whole_path("hf:uoft-cs/cifar100")
        'hf:uoft-cs/cifar100'
    """
    name = str(root).removeprefix(PREFIX)
    if name == str(root):
        return os.path.realpath(root)
    return PREFIX + os.path.realpath(name) if os.path.exists(name) else str(root)
