"""`xbm report`, `xbm compare` and `xbm drift`: pages, tables and figures about runs."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError
from xbm_app.cli.tables import check_json, check_page, print_rows
from xbm_app.files import reading, write_json


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
