"""`xbm embed` and `xbm export`: the embeddings of a trained model, or the model itself, for use elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError
from xbm_app.progress import note


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
    from xbm_app.export.exporter import export_run

    folder = Path(run)
    if not folder.exists():
        raise InputError(f"{folder} does not exist: pass a run folder created by `xbm train`")
    exported = export_run(folder, out or (folder if folder.is_dir() else folder.parent) / "export")
    for name, largest in exported.difference.items():
        size = (exported.folder / name).stat().st_size
        print(f"{name}: {size / 1e6:.1f} MB, largest difference from the run {largest:.1e} on {exported.source}")
    print(exported.folder)
