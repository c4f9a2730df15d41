"""The command line. Each command is a thin function that parses, calls and prints.

Nothing heavy is imported before a command runs, so that `xbm --help` is fast.
"""

from typing import Annotated

import typer

from xbm_app.cli import datasets, demo, runs, search, train

app = typer.Typer(
    name="xbm",
    help="Embedding learning with a cross-batch memory: train, evaluate, inspect and use image-retrieval models.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # its modules take longer to import than everything else
)


@app.callback()
def options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False
) -> None:
    if version:
        import xbm

        print(xbm.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command(short_help="train on built-in data with and without memory, and compare")(demo.demo)
app.command(short_help="train a model")(train.train)
app.command(short_help="compute Recall@K, MAP@R and R-precision")(runs.evaluate)
app.command(short_help="embed images with a trained model")(runs.embed)
app.command(short_help="embed images and store them in an index")(search.index)
app.command(short_help="find the most similar images in an index")(search.search)
app.command(short_help="serve a web page for searching")(search.serve)
app.command(short_help="export a trained model as ONNX and torch.export")(runs.export)
app.command(short_help="write a page about a run: curves, drift, retrieved images")(runs.report)
app.command(short_help="compare runs in a table and on a page")(runs.compare)
app.command(short_help="show how far embeddings move during training")(runs.drift)
app.command(short_help="list the presets, or print one as YAML")(train.presets)
app.command(short_help="decode and resize all images once, into a store")(datasets.prepare)
app.add_typer(datasets.app, name="datasets", short_help="list the benchmarks, and check a copy of one")


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def paper() -> None:
    """Moved to `python -m paper`, run from a checkout."""
    from xbm.errors import InputError

    raise InputError("the paper's experiments are now run from a checkout of the project: use `python -m paper`")
