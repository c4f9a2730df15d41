"""`xbm evaluate`: scores of a run, or of a file of embeddings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xbm.errors import InputError, unknown
from xbm_app.cli.tables import check_json, print_rows
from xbm_app.files import MALFORMED, read_arrays, write_json

# The names in the file, and the arguments of xbm.retrieval.evaluate that they become.
ARRAYS = {
    "embeddings": "embeddings",
    "labels": "labels",
    "ids": "ids",
    "gallery_embeddings": "gallery",
    "gallery_labels": "gallery_labels",
    "gallery_ids": "gallery_ids",
}
LARGEST_K = (1 << 31) - 1
NOT_SCORED = ("paths", "classes")  # for people; `xbm embed` writes them too


def evaluate(
    what: Annotated[Path, typer.Argument(help="a run folder, or an .npz file with embeddings and labels")],
    root: Annotated[Path | None, typer.Option(help="the folder with the data, if it has moved since training")] = None,
    ks: Annotated[str | None, typer.Option(help="values of K for Recall@K of an .npz file, e.g. 1,10,100")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the scores to this JSON file")] = None,
) -> None:
    """Compute Recall@K, MAP@R and R-precision with the data set's own protocol.

    Examples: `xbm evaluate runs/2026-01-31_120000_cars` · `xbm evaluate embeddings.npz --ks 1,10,100`
    """
    check_json(json)
    if what.is_file() and what.suffix == ".npz":
        if root is not None:
            raise InputError("--root is the folder with a run's images: omit it for an .npz file")
        chosen = tuple(_whole(k) for k in ks.split(",")) if ks else (1, 10, 100, 1000)
        result: dict = evaluate_npz(what, chosen)
        show_scores(result)
    else:
        if ks is not None:
            raise InputError("--ks is for .npz files, runs are scored by their data set's own protocol: omit it")
        from xbm_app.cli.train import show
        from xbm_app.train.load import evaluate_run

        result = evaluate_run(what, root)
        show(result)
    if json is not None:
        write_json(json, result)


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= LARGEST_K:
        raise InputError(f"--ks takes integers of at least 1, separated by commas, such as 1,10,100, got {text!r}")
    return value


def evaluate_npz(path: Path, ks: Sequence[int] = (1, 10, 100, 1000)) -> dict[str, float]:
    """Scores the arrays in an .npz file: `embeddings`, `labels`, and optionally `ids`, `gallery_embeddings`,
    `gallery_labels`, `gallery_ids`. See `xbm.retrieval.evaluate` for what they mean and what is returned.
    """
    from xbm.retrieval import evaluate

    arrays = _read_arrays(path)
    try:
        return evaluate(**{ARRAYS[name]: array for name, array in arrays.items()}, ks=ks)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_arrays(path: Path) -> dict[str, Any]:
    try:
        arrays = read_arrays(path, without=NOT_SCORED)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: pass an .npz file with arrays embeddings and labels") from None
    except (OSError, *MALFORMED) as error:
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
    rows = [(name, f"{value:,}" if isinstance(value, int) else f"{100 * value:.2f} %") for name, value in scores.items()]
    print_rows(["metric", "value"], rows, numbers=True)
