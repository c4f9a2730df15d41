"""`xbm evaluate embeddings.npz`: scores embeddings that come as arrays, without images or a model."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from xbm.errors import InputError, unknown

# The names in the file, and the arguments of xbm.retrieval.evaluate that they become.
ARRAYS = {
    "embeddings": "embeddings",
    "labels": "labels",
    "ids": "ids",
    "gallery_embeddings": "gallery",
    "gallery_labels": "gallery_labels",
    "gallery_ids": "gallery_ids",
}
PASSED_OVER = ("paths", "classes")  # what `xbm embed` writes beside them, for people


def evaluate_npz(path: Path, ks: Sequence[int] = (1, 10, 100, 1000)) -> dict[str, float]:
    """Scores the arrays of an .npz file: `embeddings`, `labels`, and optionally `ids`, `gallery_embeddings`,
    `gallery_labels`, `gallery_ids`. See `xbm.retrieval.evaluate` for what they mean and what is returned.
    """
    from xbm.retrieval import evaluate

    arrays = _read(path)
    try:
        return evaluate(**{ARRAYS[name]: array for name, array in arrays.items()}, ks=ks)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise InputError(f"{path} holds a single array: save embeddings and labels together with numpy.savez")
        with file:
            arrays = {name: file[name] for name in file.files if name not in PASSED_OVER}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give an .npz file with arrays embeddings and labels") from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be read as an .npz file of plain arrays ({error})") from None
    for name in arrays:
        if name not in ARRAYS:
            raise unknown(f"array in {path}:", name, ARRAYS)
    for name in ("embeddings", "labels"):
        if name not in arrays:
            raise InputError(f"{path} has no array {name!r}: save it with numpy.savez(file, {name}=...)")
    return arrays


def show_scores(scores: Mapping[str, float]) -> None:
    """Prints scores as a table: fractions in percent, counts as they are."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in scores.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{100 * value:.2f} %")
    Console().print(table)
