"""`xbm report` and `xbm compare`: runs as a page, and side by side."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="the page; by default report.html in the run folder")] = None,
) -> None:
    """Write one self-contained HTML page about a run: curves, drift, retrieved images, mined negatives.

    Example: `xbm report runs/2026-01-31_120000_cars`
    """
    from xbm_app.report.run_folders import report_runs

    print(report_runs([run], out or run / "report.html"))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders")],
    out: Annotated[Path, typer.Option(help="the page")] = Path("compare.html"),
) -> None:
    """Put runs side by side: a table here, and a page with their curves and what each retrieves.

    Example: `xbm compare runs/with_memory runs/without_memory`
    """
    from rich.table import Table

    from xbm_app.cli.tables import print_table
    from xbm_app.report.run_folders import read_result, report_runs

    results = [read_result(run) for run in runs]
    names = [name for name in results[0] if name.startswith("recall@") and not name.endswith("_std")] + ["map@r"]
    table = Table("run, in percent")
    for name in names:
        table.add_column(name.replace("recall@", "R@").replace("map@r", "MAP@R"), justify="right")
    for run, result in zip(runs, results):
        table.add_row(run.name, *(f"{100 * result[name]:.2f}" if name in result else "–" for name in names))
    print_table(table)
    print(report_runs(runs, out))
