"""`xbm datasets`: which benchmarks can be read and how; `xbm datasets check`: whether a copy of one is whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from xbm_app.data.benchmarks import Benchmark, Count

app = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.callback()
def datasets(context: typer.Context) -> None:
    """List the benchmarks: where each comes from, its terms, the expected layout, the counts.

    Example: `xbm datasets`, then `xbm datasets check cars --root ~/data/cars`
    """
    if context.invoked_subcommand is None:
        from xbm_app.data.benchmarks import BENCHMARKS

        typer.echo("\n\n".join(_describe(benchmark) for benchmark in BENCHMARKS.values()))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="a name that `xbm datasets` lists")],
    root: Annotated[Path, typer.Option(help="the folder that the benchmark was unpacked in")],
) -> None:
    """Verify a copy of a benchmark: its counts, and that every image opens; name what is missing or broken.

    The counts must be those of the owners' release; the paper's are printed beside them. Exit code 2 when the copy is
    not whole.

    Example: `xbm datasets check cars --root ~/data/cars`
    """
    from xbm.errors import InputError
    from xbm_app.data.benchmarks import count, get_benchmark, read_benchmark
    from xbm_app.data.check import BROKEN, check_dataset, listed, report
    from xbm_app.data.images import parts

    benchmark = get_benchmark(name)
    dataset = read_benchmark(name, root)
    counted = {part: count(images) for part, images in parts(dataset).items()}
    typer.echo(f"{benchmark.title} in {root}\n{_table(benchmark, counted)}")
    problems = check_dataset(dataset)
    absent = benchmark.missing(dataset)
    if absent:
        typer.echo("\n".join([f"{len(absent):,} images of the release not there:", *listed(absent)]))
    if problems:
        typer.echo(report(problems))
    broken = len({problem.text for problem in problems if problem.kind in BROKEN})
    wrong = _first_mismatch(benchmark, counted)
    if wrong or broken:
        reason = wrong or f"{broken:,} of its images cannot be opened; restore the ones named above"
        raise InputError(f"this copy of {benchmark.title} is not whole: {reason}")
    typer.echo("The counts are those of the release and every image opens.")


@app.command()
def glyphs(
    out: Annotated[Path, typer.Argument(help="a PNG file")] = Path("glyphs.png"),
    pairs: Annotated[int, typer.Option(min=1, help="how many of the closest pairs of classes to draw")] = 60,
) -> None:
    """Draw the built-in glyphs' most similar classes side by side: clean above, as the model sees them below.

    Example: `xbm datasets glyphs near.png --pairs 120`
    """
    from xbm.errors import InputError
    from xbm_app.data.glyph_classes import near_neighbours_sheet
    from xbm_app.data.glyphs import read_glyphs

    if out.suffix != ".png":
        raise InputError(f"{out} must end in .png")
    out.parent.mkdir(parents=True, exist_ok=True)
    near_neighbours_sheet(read_glyphs(), pairs).save(out)
    typer.echo(out)


def _describe(benchmark: "Benchmark") -> str:
    release = ", ".join(f"{part} {size}" for part, size in benchmark.release.items())
    paper = ", ".join(f"{part} {size}" for part, size in benchmark.paper.items()) or "does not use it"
    layout = benchmark.layout.replace("\n", "\n             ")
    return "\n".join(
        (
            f"{benchmark.name}: {benchmark.title}",
            f"  from       {benchmark.source}",
            f"  terms      {benchmark.terms}",
            f"  release    {release}",
            f"  the paper  {'as released' if benchmark.paper == benchmark.release else paper}",
            f"  Recall@K   {', '.join(map(str, benchmark.ks))}",
            f"  layout     {layout}",
        )
    )


def _table(benchmark: "Benchmark", counted: "dict[str, Count]") -> str:
    rows = [("part", "here", "release", "paper")]
    for part, size in counted.items():
        release, paper = (str(sizes.get(part, "not stated")) for sizes in (benchmark.release, benchmark.paper))
        rows.append((part, str(size), release, paper))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _first_mismatch(benchmark: "Benchmark", counted: "dict[str, Count]") -> str:
    for part, release in benchmark.release.items():
        for unit in ("images", "classes", "items"):
            here, stated = getattr(counted[part], unit), getattr(release, unit)
            if stated is not None and here != stated:
                return f"{part} has {here:,} {unit} where the release has {stated:,}"
    return ""
