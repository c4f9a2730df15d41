"""What commands give out: tables on the terminal, not cut to fit in files and pipes; and names of files that they may write."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xbm.errors import InputError
from xbm_app.progress import printable

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
        table.add_row(*map(printable, row))
    print_table(table)


def check_page(out: Path) -> None:
    """Refuses to write a page over a file that is something else, such as a picture."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{out} must end in .html")


def check_json(out: Path | None) -> None:
    """Refuses to write scores over a file that is something else."""
    if out is not None and out.suffix.lower() != ".json":
        raise InputError(f"{out} must end in .json")


def print_table(table: "Table") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
