"""`xbm drift`: how far the embeddings of fixed images moved while a run trained."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError


def drift(
    runs: Annotated[list[Path], typer.Argument(help="run folders, finished or running")],
    out: Annotated[Path | None, typer.Option(help="the figure, an SVG; by default drift.svg in the first run folder")] = None,
    json: Annotated[Path | None, typer.Option(help="write the curves to this file")] = None,
) -> None:
    """Show the feature drift D(x, t; Δt) of runs for Δt = 10, 100 and 1000, as a table and as a figure.

    Every run measures it on 32 fixed training images, in eval mode, at every line of its metrics. In a loop of your own,
    `xbm_app.train.feature_drift.Drift` does the same.

    Example: `xbm drift runs/2026-01-31_120000_cars`
    """
    if out is not None and out.suffix != ".svg":
        raise InputError(f"{out} must end in .svg")
    from rich.table import Table

    from xbm_app.cli.tables import print_table
    from xbm_app.report.printed_figures import draw_drift, drift_table, drift_values
    from xbm_app.report.run_folders import read_drift

    records = {folder.resolve().name: read_drift(folder) for folder in runs}
    table = Table("run", "Δt", "first tenth", "before the decay", "after the decay", caption="mean squared distance, at most 4")
    for name, curves in records.items():
        for row in drift_table(name, curves):
            table.add_row(*row)
    print_table(table)
    if json is not None:
        from xbm_app.train.finish import write_json

        write_json(json, {name: drift_values(record) for name, record in records.items()})
    print(draw_drift(records, out or runs[0] / "drift.svg"))
