"""The command line. Each command is a thin function that parses, calls and prints.

Nothing heavy is imported before a command runs, so that `xbm --help` is fast.
"""

from typing import Annotated

import typer

from xbm_app.cli import datasets, demo, evaluate, export, report, search, train

app = typer.Typer(
    name="xbm",
    help="Embedding learning with a cross-batch memory: train, evaluate, inspect and use image-retrieval models.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        print(installed("xbm"))
        raise typer.Exit


app.command()(demo.demo)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(export.embed)
app.command()(search.index)
app.command()(search.search)
app.command()(search.serve)
app.command()(export.export)
app.command()(report.report)
app.command()(report.compare)
app.command()(report.drift)
app.command()(train.presets)
app.command()(datasets.prepare)
app.add_typer(datasets.app, name="datasets")


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def paper() -> None:
    """Moved to `python -m paper`, run from a checkout."""
    from xbm.errors import InputError

    raise InputError("the paper's experiments are now run from a checkout of the project: use `python -m paper`")
