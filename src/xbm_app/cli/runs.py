"""Commands on a finished run: `xbm evaluate`, `report`, `compare` and `drift`; `xbm embed` and `xbm export`, for use elsewhere.

`xbm evaluate` also scores a file of embeddings, and `xbm export` also writes the rows of an index.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xbm.errors import InputError, unknown
from xbm_app.cli.tables import check_json, check_page, print_rows
from xbm_app.files import MALFORMED, read_arrays, reading, write_json
from xbm_app.progress import note

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


# ------------------------------------------------------------------ pages, tables and figures about runs


def report(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="the HTML file to write (default: report.html in the run folder)")] = None,
) -> None:
    """Write a self-contained HTML page about a run: curves, drift, retrieved images, mined negatives.

    Example: `xbm report runs/2026-01-31_120000_cars`
    """
    from xbm_app.report.run_folders import report_runs

    page = out or run / "report.html"
    check_page(page)
    print(report_runs([run], page))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders")],
    out: Annotated[Path, typer.Option(help="the HTML file to write")] = Path("compare.html"),
) -> None:
    """Compare runs: print a table, and write a page with their curves and retrieved images.

    Example: `xbm compare runs/with_memory runs/without_memory`
    """
    from xbm_app.report.run_folders import read_result, report_runs
    from xbm_app.train.metrics import metric_title

    check_page(out)
    results = [read_result(run) for run in runs]
    names = [name for name in results[0] if name.startswith("recall@") and not name.endswith("_std")] + ["map@r"]
    rows = []
    for run, result in zip(runs, results):
        with reading(run / "result.json"):
            rows.append([run.name, *(f"{100 * result[name]:.2f}" if name in result else "–" for name in names)])
    print_rows(["run, in percent", *map(metric_title, names)], rows, numbers=True)
    print(report_runs(runs, out))


def drift(
    runs: Annotated[list[Path], typer.Argument(help="run folders, finished or running")],
    out: Annotated[Path | None, typer.Option(help="the SVG file to write (default: drift.svg in the first run folder)")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the curves to this JSON file")] = None,
) -> None:
    """Show how far embeddings move during training: the feature drift D(x, t; Δt) for Δt = 10, 100 and 1000.

    Prints a table and draws a figure. Each run measures its drift on 32 fixed training images, in eval mode, whenever it logs
    its metrics. To measure it in your own training loop, use `xbm_app.train.metrics.Drift`.

    Example: `xbm drift runs/2026-01-31_120000_cars`
    """
    check_json(json)
    if out is not None and out.suffix != ".svg":
        raise InputError(f"{out} must end in .svg")
    from xbm_app.report.printed_figures import draw_drift, drift_table, drift_values
    from xbm_app.report.run_folders import read_drift

    records = {folder.resolve().name: read_drift(folder) for folder in runs}
    head = ["run", "Δt", "first tenth", "before the decay", "after the decay"]
    rows = [row for name, curves in records.items() for row in drift_table(name, curves)]
    print_rows(head, rows, caption="mean squared distance, at most 4")
    if json is not None:
        write_json(json, {name: drift_values(record) for name, record in records.items()})
    print(draw_drift(records, out or runs[0] / "drift.svg"))


# ------------------------------------------------------------------ a trained model for use elsewhere


def embed(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    images: Annotated[Path, typer.Argument(help="a folder of images, searched recursively")],
    out: Annotated[Path, typer.Option(help="the .npz or .parquet file to write")] = Path("embeddings.npz"),
) -> None:
    """Embed a folder of images with a trained model, and write paths, ids, unit vectors and labels (folder names) to a file.

    Unreadable images are reported and left out.

    Example: `xbm embed runs/2026-01-31_120000_cars ./photos --out photos.npz`
    """
    if out.suffix not in (".npz", ".parquet"):
        raise InputError(f"{out} must end in .npz or .parquet")
    import numpy as np

    from xbm_app.data.images import ImageSet, image_files
    from xbm_app.files import replacing
    from xbm_app.train.load import load

    if not images.is_dir():
        raise InputError(f"{images} is not a folder: pass the folder with the images")
    paths = image_files(images, note)
    if not paths:
        raise InputError(f"{images} contains no images (jpg, png, webp, ...): pass another folder")
    model = load(run)
    image_set = ImageSet("images", np.zeros(len(paths), np.int64), ["image"], root=images, paths=paths)
    read, embedded = model.embed_readable(image_set, note)
    if not len(read):
        raise InputError(f"none of the images in {images} can be read: repair them, or pass another folder")
    left_out = f", {len(paths) - len(read):,} images left out" if len(read) < len(paths) else ""
    paths, vectors = [paths[index] for index in read], embedded.numpy()
    folders = [str(Path(path).parent) for path in paths]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        if out.suffix == ".npz":
            names, labels = np.unique(folders, return_inverse=True)
            ids = np.arange(len(paths))
            np.savez(temporary, embeddings=vectors, labels=labels, ids=ids, paths=np.array(paths), classes=names)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
            columns = {"id": np.arange(len(paths)), "path": paths, "label": folders, "embedding": flat}
            pq.write_table(pa.table(columns), temporary, write_page_checksum=True)
    print(f"{len(paths):,} embeddings of {vectors.shape[1]} dimensions in {out}{left_out}")


def export(
    run: Annotated[str, typer.Argument(help="a run folder; or an index, or milvus:..., whose rows are exported")],
    out: Annotated[
        Path | None, typer.Option(help="the output folder (default: `export` in the run folder); for an index, a .parquet file")
    ] = None,
) -> None:
    """Export a trained model as ONNX and as a torch.export program, with a model card and a script that needs no xbm.

    Both take uint8 images of the run's crop size, in batches of any size. They are compared with the run before the command
    ends. The rows of an index are exported as a Parquet table, for other engines.

    Examples: `xbm export runs/2026-01-31_120000_cars --out cars_model` · `xbm export my_index --out rows.parquet`
    """
    from xbm_app.extras import require
    from xbm_app.search.catalogue import FILE
    from xbm_app.search.milvus import is_milvus, open_catalogue

    if is_milvus(run) or (Path(run) / FILE).is_file():
        if out is None or out.suffix.lower() != ".parquet":
            raise InputError(f"{run} is an index: pass --out with the .parquet file to write")
        from xbm_app.search.embeddings import write_parquet

        if not len(catalogue := open_catalogue(run)):
            raise InputError(f"{run} contains no images yet: run `xbm index` again")
        out.parent.mkdir(parents=True, exist_ok=True)
        rows = write_parquet(catalogue, out)
        print(f"{rows:,} rows of {catalogue.get('dim')} dimensions in {out}")
        return
    require("export", "onnx", "onnxscript", "onnxruntime")
    from xbm_app.export import export_run

    folder = Path(run)
    if not folder.exists():
        raise InputError(f"{folder} does not exist: pass a run folder created by `xbm train`")
    exported = export_run(folder, out or (folder if folder.is_dir() else folder.parent) / "export")
    for name, largest in exported.difference.items():
        size = (exported.folder / name).stat().st_size
        print(f"{name}: {size / 1e6:.1f} MB, largest difference from the run {largest:.1e} on {exported.source}")
    print(exported.folder)
