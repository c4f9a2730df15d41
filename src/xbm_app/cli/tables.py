"""Tables for the terminal, and for files and pipes, where nothing is cut to fit."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 250  # columns, where no screen sets a limit


def print_table(table: "Table") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
