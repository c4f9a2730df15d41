"""`xbm index`: the images of a folder, ready to be searched."""

from pathlib import Path
from typing import Annotated

import typer


def index(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    images: Annotated[Path, typer.Argument(help="a folder of images, or a CSV or Parquet table with path and label")],
    out: Annotated[Path | None, typer.Option(help="the index; by default the folder index in the run folder")] = None,
) -> None:
    """Embed images with a trained model and keep them as an index to search; called again, it does only what has changed.

    New and changed images are embedded, those that are gone are removed, the others are left alone. It can be stopped, or
    killed, at any moment, and goes on where it was. What cannot be read is named and left out.

    Example: `xbm index runs/2026-01-31_120000_cars ./photos`
    """
    import sys
    import time

    from xbm.errors import InputError
    from xbm_app.extras import require

    require("search", "faiss")
    from contextlib import closing

    from xbm_app.search.catalogue import Catalogue
    from xbm_app.search.neighbours import build, recall
    from xbm_app.search.update import update

    def tell(error: InputError) -> None:
        print(f"note: {error}", file=sys.stderr)

    if not run.exists():
        raise InputError(f"{run} does not exist: give a run folder made by `xbm train`")
    folder = out or (run if run.is_dir() else run.parent) / "index"
    begun = time.monotonic()
    found = update(run, images, folder, tell)
    embedded = found.new + found.changed - found.unreadable
    print(
        f"{embedded:,} embedded ({found.new:,} new, {found.changed:,} changed), {found.removed:,} removed, "
        f"{found.unchanged:,} unchanged" + (f", {found.unreadable:,} left out" if found.unreadable else "")
    )
    with closing(Catalogue(folder)) as catalogue:
        neighbours = build(catalogue)
        if found.new or found.changed or found.removed or catalogue.get("recall@10") is None:
            catalogue.set("recall@10", recall(neighbours, catalogue))
        how = "every vector is compared" if neighbours.kind == "exact" else "measured on up to 256 images"
        size = f"{neighbours.bytes / 1e6:,.1f} MB in memory"
        print(
            f"{neighbours.kind} index of {len(catalogue):,} images, {size}; "
            f"recall@10 against exact search {catalogue.get('recall@10'):.3f} ({how}); {time.monotonic() - begun:.1f} s"
        )
    print(folder)
