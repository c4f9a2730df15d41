"""`xbm prepare`: decode and resize every image of a data set once, so that training need not."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from xbm_app.data.images import Dataset


def prepare(
    data: Annotated[str, typer.Argument(metavar="NAME|DIR", help="a benchmark's name, a folder of class folders, or a table")],
    out: Annotated[Path, typer.Option(help="the folder to make; each set gets a folder in it")],
    root: Annotated[Path | None, typer.Option(help="for a benchmark: the folder that it was unpacked in")] = None,
    resize: Annotated[int, typer.Option(min=1, help="side of the stored images")] = 256,
    mode: Annotated[
        str, typer.Option(help="square: side × side; shorter: keep the aspect, as the released code does")
    ] = "square",
    workers: Annotated[int | None, typer.Option(min=0, help="threads; one a core unless given")] = None,
) -> None:
    """Decode and resize all images once into a store that training reads without decoding.

    The folder is then a data set of its own: `--store` works without the images beside it.

    Stopped half-way it goes on where it was; run again after images have changed it makes only those anew.

    Example: `xbm prepare cars --root ~/data/cars --out ~/data/cars-store`, or `xbm prepare ./photos --out ./photos-store`
    """
    from xbm.errors import InputError
    from xbm_app.data import store_writer as store
    from xbm_app.data.images import parts
    from xbm_app.data.store import folder_of
    from xbm_app.data.store_writer import write_outline

    if (out / "config.yaml").exists():
        raise InputError(f"{out} is a run folder: give another --out for the store")
    dataset = _read(data, root)
    sets = {folder_of(name): images for name, images in parts(dataset).items()}
    count = sum(len(images) for images in sets.values())
    needed = sum(store.to_write(images, out / name, resize, mode) for name, images in sets.items())
    typer.echo(f"{count:,} images in {len(sets)} sets: about {needed / 1e9:.2f} GB to write to {out}")
    store.require_room(out, needed)
    for name, images in sets.items():
        store.prepare(images, out / name, resize, mode, workers)
        typer.echo(f"{out / name}: {len(images):,} images")
    write_outline(dataset, out)


def _read(data: str, root: Path | None) -> "Dataset":
    from xbm.errors import InputError, unknown
    from xbm_app.data.benchmarks import BENCHMARKS, read_benchmark
    from xbm_app.data.own_images import read_folder, read_table

    if data in BENCHMARKS:
        if root is None:
            raise InputError(f"say where {data} is: xbm prepare {data} --root DIR --out STORE")
        return read_benchmark(data, root)
    path = Path(data)
    if path.is_dir():
        return read_folder(path)
    if path.is_file():
        return read_table(path, root)
    raise unknown("benchmark or folder", data, BENCHMARKS)
