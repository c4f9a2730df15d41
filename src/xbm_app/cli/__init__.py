"""The command line. Each command is a thin function in a file of its own: it parses, calls, prints.

Nothing heavy is imported before a command runs, so that `xbm --help` answers at once.
"""

from typing import Annotated

import typer

from xbm_app.cli import (
    datasets,
    demo,
    drift,
    embed,
    evaluate,
    export,
    index,
    prepare,
    presets,
    report,
    search,
    serve,
    train,
)

app = typer.Typer(
    name="xbm",
    help="Learn embeddings with a memory: train, evaluate, explain and use image-retrieval models.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", help="say which version this is")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        print(installed("xbm"))
        raise typer.Exit


app.command()(demo.demo)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(embed.embed)
app.command()(index.index)
app.command()(search.search)
app.command()(serve.serve)
app.command()(export.export)
app.command()(report.report)
app.command()(report.compare)
app.command()(drift.drift)
app.command()(presets.presets)
app.command()(prepare.prepare)
app.add_typer(datasets.app, name="datasets")


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def paper() -> None:
    """The paper's experiments are run from a checkout: `python -m paper`."""
    from xbm.errors import InputError

    raise InputError("the paper's experiments are now run from a checkout of the project: use `python -m paper`")
