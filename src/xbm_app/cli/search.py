"""`xbm index`, `xbm search` and `xbm serve`: find similar images."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError
from xbm_app.cli.tables import print_rows


def index(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    images: Annotated[Path, typer.Argument(help="a folder of images, or a CSV or Parquet table with columns path and label")],
    out: Annotated[Path | None, typer.Option(help="the index folder (default: `index` in the run folder)")] = None,
) -> None:
    """Embed images with a trained model and store them in an index for `xbm search`. Running it again updates the index.

    An update embeds new and changed images and removes those that no longer exist. It can be interrupted at any moment and
    continues where it stopped. Unreadable images are reported and left out.

    Example: `xbm index runs/2026-01-31_120000_cars ./photos`
    """
    import sys
    import time
    from contextlib import closing

    from xbm_app.extras import require

    require("search", "faiss")

    from xbm_app.search.catalogue import Catalogue
    from xbm_app.search.neighbours import build, recall
    from xbm_app.search.update import update

    def report(error: InputError) -> None:
        print(f"note: {error}", file=sys.stderr)

    if not run.exists():
        raise InputError(f"{run} does not exist: pass a run folder created by `xbm train`")
    folder = out or (run if run.is_dir() else run.parent) / "index"
    start = time.monotonic()
    changes = update(run, images, folder, report)
    embedded = changes.new + changes.changed - changes.unreadable
    print(
        f"{embedded:,} embedded ({changes.new:,} new, {changes.changed:,} changed), {changes.removed:,} removed, "
        f"{changes.unchanged:,} unchanged" + (f", {changes.unreadable:,} left out" if changes.unreadable else "")
    )
    with closing(Catalogue(folder)) as catalogue:
        neighbours = build(catalogue)
        if changes.new or changes.changed or changes.removed or catalogue.get("recall@10") is None:
            catalogue.set("recall@10", recall(neighbours, catalogue))
        how = "every vector is compared" if neighbours.kind == "exact" else "measured on up to 256 images"
        size = f"{neighbours.bytes / 1e6:,.1f} MB in memory"
        print(
            f"{neighbours.kind} index of {len(catalogue):,} images, {size}; "
            f"recall@10 against exact search {catalogue.get('recall@10'):.3f} ({how}); {time.monotonic() - start:.1f} s"
        )
    print(folder)


def search(
    index: Annotated[Path, typer.Argument(help="an index, or the run folder that contains it")],
    queries: Annotated[list[Path], typer.Argument(help="one or more image files")],
    top: Annotated[int, typer.Option(help="results per query")] = 10,
    label: Annotated[str | None, typer.Option(help="search only images with this label")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    sheet: Annotated[Path | None, typer.Option(help="also write the results and their images to this HTML file")] = None,
) -> None:
    """Find the images in an index that are most similar to the query images.

    Example: `xbm search runs/2026-01-31_120000_cars query.jpg` · `xbm search my_index a.jpg b.jpg --top 5 --json`
    """
    import json as json_module
    import sys

    from xbm_app.search.searcher import Searcher, shown_path

    searcher = Searcher(index)
    answers, failed = [], []
    for query in queries:
        try:
            image = searcher.open(query)
        except InputError as error:
            failed.append(error)
            print(f"error: {error}", file=sys.stderr)
            continue
        answers.append((query, image, searcher.search(searcher.embed(image), top, label)))
    if label is not None and answers and not any(hits for _, _, hits in answers):
        raise InputError(f"no image in {searcher.folder} has the label {label!r}: omit --label, or spell it as in the index")
    if json:
        results = [
            {
                "query": str(query),
                "results": [
                    {"similarity": hit.similarity, "label": hit.label, "path": shown_path(searcher.root, hit.path)}
                    for hit in hits
                ],
            }
            for query, _, hits in answers
        ]
        print(json_module.dumps(results, indent=2, ensure_ascii=False))
    else:
        from rich.markup import escape

        for query, _, hits in answers:
            rows = [
                [str(rank), f"{hit.similarity:.4f}", escape(hit.label), escape(shown_path(searcher.root, hit.path))]
                for rank, hit in enumerate(hits, start=1)
            ]
            print_rows(["", "similarity", "label", "path"], rows, title=escape(str(query)), title_justify="left")
    if sheet is not None and answers:
        from xbm_app.search.results_page import write_results_page

        pictures = [(str(query), image, hits) for query, image, hits in answers]
        write_results_page(sheet, f"Search in {searcher.name}", pictures, searcher.catalogue.thumbnail)
        print(sheet, file=sys.stderr if json else sys.stdout)
    if failed:
        raise typer.Exit(2)


def serve(
    indexes: Annotated[
        list[Path], typer.Argument(help="an index, or the run folder that contains it; pass two to compare them")
    ],
    host: Annotated[
        str, typer.Option(help="address to listen on; a token is required unless it is a loopback address")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 selects a free one")] = 8000,
    allow_host: Annotated[list[str] | None, typer.Option(help="additional host name to accept in the Host header")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="XBM_TOKEN", help="access token required for every request (default: generated if one is required)"
        ),
    ] = None,
) -> None:
    """Serve a web page for searching: drop, paste or pick an image, or click one. Two indexes are compared side by side.

    The API is at /api/search, its description at /api/openapi.json. The page loads nothing from the network.

    Example: `xbm serve runs/2026-01-31_120000_cars` · `xbm serve with_memory without_memory --port 9000`
    """
    from xbm_app.extras import require

    require("search", "faiss", "fastapi", "uvicorn", "python_multipart")
    from xbm_app.serve.server import serve as run

    run(indexes, host, port, allow_host or (), token)
