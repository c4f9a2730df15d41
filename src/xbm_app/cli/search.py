"""`xbm search`: an image in, the nearest ones out."""

from pathlib import Path
from typing import Annotated

import typer


def search(
    index: Annotated[Path, typer.Argument(help="an index, or the run folder it lies in")],
    queries: Annotated[list[Path], typer.Argument(help="one or more images")],
    top: Annotated[int, typer.Option(help="results for each")] = 10,
    label: Annotated[str | None, typer.Option(help="search only images with this label")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    sheet: Annotated[Path | None, typer.Option(help="also write a page with the pictures to this HTML file")] = None,
) -> None:
    """Find the images of an index that are most similar to the given ones.

    Example: `xbm search runs/2026-01-31_120000_cars query.jpg` · `xbm search my_index a.jpg b.jpg --top 5 --json`
    """
    import json as format
    import sys

    from xbm.errors import InputError
    from xbm_app.search.searcher import Searcher, shown_path

    opened = Searcher(index)
    answers, failed = [], []
    for query in queries:
        try:
            image = opened.open(query)
        except InputError as error:
            failed.append(error)
            print(f"error: {error}", file=sys.stderr)
            continue
        answers.append((query, image, opened.search(opened.embed(image), top, label)))
    if label is not None and answers and not any(hits for _, _, hits in answers):
        raise InputError(
            f"no image of {opened.folder} has the label {label!r}: leave --label out, or spell it as the index does"
        )
    if json:
        found = [
            {
                "query": str(query),
                "results": [
                    {"similarity": hit.similarity, "label": hit.label, "path": shown_path(opened.root, hit.path)}
                    for hit in hits
                ],
            }
            for query, _, hits in answers
        ]
        print(format.dumps(found, indent=2, ensure_ascii=False))
    else:
        from rich.markup import escape
        from rich.table import Table

        from xbm_app.cli.tables import print_table

        for query, _, hits in answers:
            table = Table("", "similarity", "label", "path", title=escape(str(query)), title_justify="left")
            for rank, hit in enumerate(hits, start=1):
                where = shown_path(opened.root, hit.path)
                table.add_row(str(rank), f"{hit.similarity:.4f}", escape(hit.label), escape(where))
            print_table(table)
    if sheet is not None and answers:
        from xbm_app.search.results_page import write_results_page as write_sheet

        pictures = [(str(query), image, hits) for query, image, hits in answers]
        write_sheet(sheet, f"Search in {opened.name}", pictures, opened.catalogue.thumbnail)
        print(sheet, file=sys.stderr if json else sys.stdout)
    if failed:
        raise typer.Exit(2)
