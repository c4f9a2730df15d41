"""`xbm embed`: images in, vectors out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError


def embed(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    images: Annotated[Path, typer.Argument(help="a folder of images, searched through to the bottom")],
    out: Annotated[Path, typer.Option(help="an .npz or .parquet file")] = Path("embeddings.npz"),
) -> None:
    """Embed a folder of images with a trained model: paths, ids and unit vectors; labels are the images' folders.

    What cannot be read is named and left out.

    Example: `xbm embed runs/2026-01-31_120000_cars ./photos --out photos.npz`
    """
    if out.suffix not in (".npz", ".parquet"):
        raise InputError(f"{out} must end in .npz or .parquet")
    import numpy as np

    from xbm_app.data.images import ImageSet, image_files
    from xbm_app.train.files import replacing
    from xbm_app.train.load import load

    if not images.is_dir():
        raise InputError(f"{images} is not a folder: give the folder that holds the images")
    paths = image_files(images)
    if not paths:
        raise InputError(f"{images} holds no images (jpg, png, webp, ...): give another folder")
    model = load(run)
    found = ImageSet("images", np.zeros(len(paths), np.int64), ["image"], root=images, paths=paths)
    read, embedded = model.embed_readable(found, lambda error: print(f"note: {error}", file=sys.stderr))
    if not len(read):
        raise InputError(f"none of the images of {images} can be read: mend them, or give another folder")
    left_out = f", {len(paths) - len(read):,} images left out" if len(read) < len(paths) else ""
    paths, vectors = [paths[index] for index in read], embedded.numpy()
    folders = [str(Path(path).parent) for path in paths]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as beside:
        if out.suffix == ".npz":
            names, labels = np.unique(folders, return_inverse=True)
            ids = np.arange(len(paths))
            np.savez(beside, embeddings=vectors, labels=labels, ids=ids, paths=np.array(paths), classes=names)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
            columns = {"id": np.arange(len(paths)), "path": paths, "label": folders, "embedding": flat}
            pq.write_table(pa.table(columns), beside)
    print(f"{len(paths):,} embeddings of {vectors.shape[1]} dimensions in {out}{left_out}")
