"""Tables on the terminal; in files and pipes nothing is cut to fit."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 250  # columns, if there is no terminal


def print_table(table: "Table") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
