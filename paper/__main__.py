"""`python -m paper`: the paper's tables and figures as experiments; list them, run them, write the page."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)
DATA = typer.Option("--data", help="NAME=DIR, images or a store of `xbm prepare`; `glyphs` is built in; may be repeated")
DOCS = Path(__file__).parents[1] / "docs"
RESULTS_FOLDER = Path(__file__).parent / "results"
RESULTS = typer.Option(help="where the result files are: one small JSON a finished run")


@app.callback()
def paper(
    context: typer.Context,
    results: Annotated[Path, RESULTS] = RESULTS_FOLDER,
) -> None:
    """List the experiments: every table and figure of the paper, and how many runs of each are there.

    Example: `python -m paper`, then `python -m paper run s-table-3 --data cars=~/cars --trunk resnet50`, then
    `python -m paper report`
    """
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from paper.page import settings_of
    from paper.record import Records
    from paper.registry import ALL
    from paper.study import Study
    from xbm_app.cli.tables import print_table

    records = Records(results)
    settings = settings_of(records)
    table = Table(
        "experiment", "what", "in the paper", "runs there", caption="python -m paper run NAME --data cars=DIR [--trunk NAME]"
    )
    for experiment in ALL.values():
        studies = [Study(experiment, setting, records) for setting in settings if experiment.suits(setting)]
        there = {id(run) for study in studies for arm in study.arms for run in study.runs(arm)}
        table.add_row(experiment.name, experiment.title, experiment.source, str(len(there)))
    table.add_row("smoke", "All of them in miniature, on the built-in glyphs", "", "")
    print_table(table)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="experiments that `python -m paper` lists, or smoke")],
    data: Annotated[list[str] | None, DATA] = None,
    trunk: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=FILE with its weights; googlenet unless given; may be repeated")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="seeds of each run on the test classes (default: 3, or what the experiment has)")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs side by side: several small ones share a GPU well")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=1, help="seconds: no run is begun that would not end in time, and the rest is stopped")
    ] = None,
    results: Annotated[Path, RESULTS] = RESULTS_FOLDER,
    runs: Annotated[Path, typer.Option(help="where run folders go; one that was stopped is gone on with")] = Path("runs/paper"),
) -> None:
    """Run experiments: choose learning rates on held-out training classes, then train and score on the test classes.

    What is in the results folder is not run again, whichever experiment it was run for. It can be stopped at any moment.

    Examples: `python -m paper run smoke` ·
    `python -m paper run s-table-3 --data cars=~/cars --trunk efficientnet_lite0 --jobs 3` ·
    `python -m paper run figure-1 batch-size --data cars=~/cars-store --trunk resnet50_v1=weights.safetensors --budget 540`
    """
    from paper.plan import plan
    from paper.record import Records
    from paper.registry import experiment
    from paper.workers import run_all
    from xbm.errors import InputError

    def tell(text: str) -> None:
        print(text, flush=True)

    if "smoke" in names:
        from paper.smoke import run_smoke

        chosen = [experiment(name).name for name in names if name != "smoke"]
        outcome = run_smoke(runs / "smoke", chosen or None, tell=tell)
        print(runs / "smoke" / "results.md")
    else:
        from paper.machine import machine_of

        chosen_experiments = [experiment(name) for name in names]
        machine = machine_of(data or [], trunk or [])
        records = Records(results)
        settings = machine.settings()
        first = plan(chosen_experiments, settings, seeds, records)
        if not (first.done or first.ready or first.waiting):
            raise InputError(f"{', '.join(names)}: nothing of it is for this data: `python -m paper` lists what each is for")
        tell(f"{first.done} runs are there, {len(first.ready)} can start, {first.waiting} wait for a learning rate")
        outcome = run_all(
            lambda: plan(chosen_experiments, settings, seeds, records),
            machine.place,
            records,
            runs,
            jobs,
            float("inf") if budget is None else budget,
            tell,
        )
    tell(f"{outcome.made} runs made, {outcome.left} left")
    if outcome.failed:
        raise InputError(f"{len(outcome.failed)} runs failed, the first: {next(iter(outcome.failed.values()))}")


@app.command()
def report(
    results: Annotated[Path, RESULTS] = RESULTS_FOLDER,
    out: Annotated[Path, typer.Option(help="where results.md, robustness.md and their figures go")] = Path(__file__).parents[1]
    / "docs",
    data: Annotated[list[str] | None, DATA] = None,
) -> None:
    """Write the pages of results and their figures; with the data at hand, sheets of photographs too.

    Example: `python -m paper report` · `python -m paper report --data cars=~/cars`
    """
    from paper.experiment import base, setting_of
    from paper.machine import machine_of
    from paper.page import BEYOND_THE_PAPER, RESULTS, write_page
    from paper.record import Records
    from xbm.errors import InputError
    from xbm_app.train.dataset import read_data

    records = Records(results)
    if not len(records):
        raise InputError(f"{results} holds no results: give the folder that `python -m paper run` writes to")
    datasets = {}
    if data:
        machine = machine_of(data, [])
        datasets = {name: read_data(machine.place(base(setting_of(name))).data) for name in machine.data}
    for document in (RESULTS, BEYOND_THE_PAPER):
        print(write_page(records, out, datasets, document=document))


if __name__ == "__main__":
    from xbm_app.main import main

    main(lambda: app)
