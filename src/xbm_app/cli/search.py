"""`xbm index`, `xbm search` and `xbm serve`: find similar images."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError
from xbm_app.cli.tables import check_page, print_rows
from xbm_app.progress import note, printable


def index(
    run: Annotated[Path, typer.Argument(help="a run folder, or embeddings made elsewhere (.npz or Parquet)")],
    images: Annotated[
        Path | None, typer.Argument(help="a folder of images, or a CSV or Parquet table with columns path and label")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the index folder (default: `index` in the run folder)")] = None,
    to: Annotated[str | None, typer.Option(help="keep the index in Milvus: milvus:FILE.db or milvus:http://HOST:PORT")] = None,
    encoder: Annotated[str | None, typer.Option(help="module:object that embeds images, instead of a run")] = None,
) -> None:
    """Embed images with a trained model and store them in an index for `xbm search`. Running it again updates the index.

    An update embeds new and changed images and removes those that no longer exist. It can be interrupted at any moment and
    continues where it stopped. Unreadable images are reported and left out. Other columns of a table can be used in filters.

    Examples: `xbm index runs/2026-01-31_120000_cars ./photos` · `xbm index rows.parquet --out my_index` (embeddings made
    elsewhere; add the folder of their images for thumbnails) · `xbm index ./photos --encoder clip:Encoder --out my_index`
    """
    import time

    from xbm_app.extras import require

    require("serve", "faiss")

    from xbm_app.search.embeddings import is_embeddings
    from xbm_app.search.milvus import AnyCatalogue, is_milvus
    from xbm_app.search.neighbours import build, recall
    from xbm_app.search.searcher import OwnEncoder
    from xbm_app.search.update import Changes, update, update_embeddings

    if not run.exists():
        wanted = "a run folder created by `xbm train`, or a file of embeddings" if encoder is None else "a folder of images"
        raise InputError(f"{run} does not exist: pass {wanted}")
    made_elsewhere = encoder is None and is_embeddings(run)
    if to is not None and not is_milvus(to):
        raise InputError(f"--to takes milvus:FILE.db or milvus:http://HOST:PORT, got {to!r}: use --out for a folder")
    if out is not None and to is not None:
        raise InputError("--out and --to are two places for the index: omit one")
    if out is None and to is None and (made_elsewhere or encoder is not None):
        raise InputError("only an index of a run has a default place: pass --out with the folder to write")
    folder = to or out or (run if run.is_dir() else run.parent) / "index"
    start = time.monotonic()

    def finish(catalogue: AnyCatalogue, changes: Changes) -> None:
        embedded = changes.new + changes.changed - changes.unreadable
        print(
            f"{embedded:,} embedded ({changes.new:,} new, {changes.changed:,} changed), {changes.removed:,} removed, "
            f"{changes.unchanged:,} unchanged" + (f", {changes.unreadable:,} left out" if changes.unreadable else "")
        )
        neighbours = build(catalogue)
        if changes.new or changes.changed or changes.removed or catalogue.get("recall@10") is None:
            catalogue.set("recall@10", recall(neighbours, catalogue))
        catalogue.publish()
        found = catalogue.get("recall@10")
        if neighbours.kind == "exact":
            how = "every vector is compared, so recall@10 is 1.000"
        elif found is not None:
            how = f"recall@10 against exact search {found:.3f}, measured on up to 256 images"
        else:
            how = "recall@10 was not measured, which takes all rows"
        size = str(to) if to is not None else f"{neighbours.bytes / 1e6:,.1f} MB in memory"
        print(f"{neighbours.kind} index of {len(catalogue):,} images, {size}; {how}; {time.monotonic() - start:.1f} s")

    if made_elsewhere:
        update_embeddings(run, folder, images, note, finish)
    elif encoder is not None:
        if images is not None:
            raise InputError("--encoder takes the place of the run: pass the images only")
        update(OwnEncoder(encoder), run, folder, note, then=finish)
    elif images is None:
        raise InputError("pass the images to index: a folder, or a CSV or Parquet table with the columns path and label")
    else:
        update(run, images, folder, note, then=finish)
    print(folder)


def search(
    index: Annotated[str, typer.Argument(help="an index, the run folder that contains it, or milvus:...")],
    queries: Annotated[list[Path] | None, typer.Argument(help="one or more image files")] = None,
    text: Annotated[str | None, typer.Option(help="search by text, if the encoder reads text")] = None,
    top: Annotated[int, typer.Option(help="results per query")] = 10,
    offset: Annotated[int, typer.Option(help="results to leave out: those of earlier pages")] = 0,
    label: Annotated[str | None, typer.Option(help="search only images with this label")] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="a condition on the metadata, such as price<=20; may be repeated")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="module:object that embeds queries, for an index without a model")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    sheet: Annotated[Path | None, typer.Option(help="also write the results and their images to this HTML file")] = None,
) -> None:
    """Find the images in an index that are most similar to the query images, or to a text.

    Example: `xbm search runs/2026-01-31_120000_cars query.jpg` · `xbm search my_index a.jpg b.jpg --top 5 --json` ·
    `xbm search my_index --encoder clip:Encoder --text "a red chair" --filter "price<=200"`
    """
    import json as json_module
    import sys

    from xbm_app.search.filters import filters_of
    from xbm_app.search.searcher import OwnEncoder, Query, Searcher, shown_path, write_results_page

    if not queries and text is None:
        raise InputError("nothing to search for: pass one or more image files, or --text")
    conditions = filters_of(filters, label)
    if sheet is not None:
        check_page(sheet)
    searcher = Searcher(index, encoder=None if encoder is None else OwnEncoder(encoder))
    if queries:
        searcher.encoder()  # without one, no query can be answered
    answers: list[Query] = []
    failed = []
    for query in queries or ():
        try:
            image = searcher.open(query)
        except InputError as error:
            failed.append(error)
            print(f"error: {printable(str(error))}", file=sys.stderr)
            continue
        answers.append((str(query), image, searcher.search(searcher.embed(image), top, conditions, offset)))
    if text is not None:
        answers.append((text, None, searcher.search(searcher.embed_text(text), top, conditions, offset)))
    if conditions and answers and not any(hits for _, _, hits in answers):
        met = " and ".join(map(str, conditions))
        raise InputError(f"no image in {searcher.folder} meets {met}: omit a filter, or spell it as in the index")
    if json:
        results = [
            {
                "query": name,
                "results": [
                    {"similarity": hit.similarity, "label": hit.label, "path": shown_path(searcher.root, hit.path), **hit.data}
                    for hit in hits
                ],
            }
            for name, _, hits in answers
        ]
        lines = json_module.dumps(results, indent=2, ensure_ascii=False).split("\n")
        print("\n".join(map(printable, lines)))
    else:
        from rich.markup import escape

        for title, _, hits in answers:
            names = list(dict.fromkeys(name for hit in hits for name in hit.data))
            rows = [
                [
                    str(rank), f"{hit.similarity:.4f}", escape(hit.label), escape(shown_path(searcher.root, hit.path)),
                    *(escape(str(hit.data.get(column, ""))) for column in names),
                ]
                for rank, hit in enumerate(hits, start=1)
            ]  # fmt: skip
            columns = ["", "similarity", "label", "path", *map(escape, names)]
            print_rows(columns, rows, title=escape(printable(title)), title_justify="left")
    if sheet is not None and answers:
        write_results_page(sheet, f"Search in {searcher.name}", answers, searcher.catalogue.thumbnail)
        print(sheet, file=sys.stderr if json else sys.stdout)
    if failed:
        raise typer.Exit(2)


def serve(
    indexes: Annotated[
        list[str], typer.Argument(help="an index, the run folder that contains it, or milvus:...; pass two to compare them")
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
    encoder: Annotated[str | None, typer.Option(help="module:object that embeds queries, for an index without a model")] = None,
) -> None:
    """Serve a web page for searching: drop, paste or pick an image, or click one. Two indexes are compared side by side.

    The API is at /api/search, its description at /api/openapi.json. The page loads nothing from the network.

    Example: `xbm serve runs/2026-01-31_120000_cars` · `xbm serve with_memory without_memory --port 9000`
    """
    from xbm_app.extras import require

    require("serve", "faiss", "fastapi", "uvicorn", "python_multipart")
    from xbm_app.serve.server import serve as run

    run(indexes, host, port, allow_host or (), token, encoder)
