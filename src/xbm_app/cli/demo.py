"""`xbm demo`: what the memory does, in a few minutes on a laptop."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="where the runs and the page go; an earlier demo there is replaced")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[int, typer.Option(help="runs of each kind")] = 3,
    iterations: Annotated[int | None, typer.Option(help="of each run")] = None,
    json: Annotated[Path | None, typer.Option(help="write every figure to this file")] = None,
) -> None:
    """Train on the built-in glyphs with and without memory, and write a page that shows the difference.

    Example: `xbm demo` · `xbm demo --seeds 1 --json figures.json`
    """
    import math
    import os
    import shlex
    import sys
    import time
    import webbrowser

    from rich.console import Console
    from rich.table import Table

    from xbm_app.demo import ITERATIONS, next_steps, run_demo, summary

    begun = time.monotonic()
    console = Console()
    runs = run_demo(out, seeds, iterations or ITERATIONS, tell=lambda text: console.print(text, highlight=False))
    table = Table("loss", "R@1", "± s.e.", "gain from memory", "seeds")
    for row in summary(runs):
        gain = f"{100 * row['gain']:+.1f} ± {100 * row['gain_error']:.1f}" if "gain" in row else ""
        error = "" if math.isnan(row["error"]) else f"{100 * row['error']:.1f}"
        table.add_row(row["name"], f"{100 * row['mean']:.1f}", error, gain.replace(" ± nan", ""), str(row["seeds"]))
    console.print(table)
    if json is not None:
        from xbm_app.train.finish import write_json

        write_json(json, {"runs": runs, "seconds": time.monotonic() - begun})
    from xbm_app.report.run_folders import report_runs

    page = report_runs([Path(run["folder"]) for run in runs], out / "report.html", groups=[run["name"] for run in runs])
    print("Search with the best of them, then beside the same loss without memory:")
    for words in next_steps(runs, out):
        print(f"  {_called()} {shlex.join(words)}")
    console.print(f"{time.monotonic() - begun:.0f} s in all. The page:", highlight=False)
    print(page.resolve())
    if console.is_terminal and (sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY")):
        webbrowser.open(page.resolve().as_uri())


def _called() -> str:
    """How this program was called, so that what it prints can be typed: `make demo` calls no `xbm` that is on the path."""
    import os
    import shlex
    import sys

    if os.path.basename(sys.argv[0]) != "__main__.py":
        return "xbm"
    python = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if python.startswith('..') else python)} -m xbm"
