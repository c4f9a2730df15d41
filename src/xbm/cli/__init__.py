"""The command line. Each command is a thin function in a file of its own: it parses, calls, prints.

Nothing heavy is imported before a command runs, so that `xbm --help` answers at once.
"""

import typer

app = typer.Typer(
    name="xbm",
    help="Learn embeddings with a memory: train, evaluate and explain image-retrieval models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.callback()
def root() -> None:
    """Shared by every command."""
