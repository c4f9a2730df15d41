"""Tables on the terminal; in files and pipes nothing is cut to fit."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 250  # columns, if there is no terminal


def print_rows(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, **options: Any) -> None:
    """Prints rows as a table.

    Args:
        numbers: aligns all columns but the first to the right.
        options: of `rich.table.Table`, e.g. its caption.
    """
    from rich.table import Table

    table = Table(**options)
    for column, title in enumerate(head):
        table.add_column(title, justify="right" if numbers and column else "left")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_table(table: "Table") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
