"""`xbm datasets`: the benchmarks, and whether a copy of one is complete; `xbm prepare`: decode a data set once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xbm.errors import InputError, unknown

if TYPE_CHECKING:
    from xbm_app.data.benchmarks import Benchmark, Count
    from xbm_app.data.images import Dataset

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def datasets(context: typer.Context) -> None:
    """List the benchmarks: source, terms of use, expected layout, and numbers of images and classes.

    Example: `xbm datasets`, then `xbm datasets check cars --root ~/data/cars`
    """
    if context.invoked_subcommand is None:
        from xbm_app.data.benchmarks import BENCHMARKS

        typer.echo("\n\n".join(_describe(benchmark) for benchmark in BENCHMARKS.values()))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="a name listed by `xbm datasets`")],
    root: Annotated[Path, typer.Option(help="the folder with the unpacked benchmark")],
) -> None:
    """Verify a copy of a benchmark: count images and classes, open every image, and list what is missing or broken.

    The counts must match the official release; those of the paper are printed for comparison. The exit code is 2 if the copy
    is incomplete.

    Example: `xbm datasets check cars --root ~/data/cars`
    """
    from xbm_app.data.benchmarks import count, get_benchmark, read_benchmark
    from xbm_app.data.check import BROKEN, check_dataset, listed, report
    from xbm_app.data.images import parts

    benchmark = get_benchmark(name)
    dataset = read_benchmark(name, root)
    counted = {part: count(images) for part, images in parts(dataset).items()}
    typer.echo(f"{benchmark.title} in {root}\n{_table(benchmark, counted)}")
    problems = check_dataset(dataset)
    missing = benchmark.missing(dataset)
    if missing:
        typer.echo("\n".join([f"{len(missing):,} images of the release are missing:", *listed(missing)]))
    if problems:
        typer.echo(report(problems))
    broken = len({problem.text for problem in problems if problem.kind in BROKEN})
    mismatch = _first_mismatch(benchmark, counted)
    if mismatch or broken:
        reason = mismatch or f"{broken:,} of its images cannot be opened; restore those listed above"
        raise InputError(f"this copy of {benchmark.title} is incomplete: {reason}")
    typer.echo("The counts match the release and every image opens.")


@app.command()
def glyphs(
    out: Annotated[Path, typer.Argument(help="the PNG file to write")] = Path("glyphs.png"),
    pairs: Annotated[int, typer.Option(min=1, help="number of class pairs to draw")] = 60,
) -> None:
    """Draw the most similar classes of the built-in glyphs side by side: clean in the first row, degraded in the second.

    Example: `xbm datasets glyphs near.png --pairs 120`
    """
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


def prepare(
    data: Annotated[str, typer.Argument(metavar="NAME|DIR", help="a benchmark, a folder, a table, tar shards, or hf:NAME")],
    out: Annotated[Path, typer.Option(help="the store to create: a folder with a subfolder for each image set")],
    root: Annotated[Path | None, typer.Option(help="the folder with the unpacked benchmark")] = None,
    resize: Annotated[int, typer.Option(min=1, help="side of the stored images in pixels")] = 256,
    mode: Annotated[
        str, typer.Option(help="square: side × side; shorter: keep the aspect ratio, as in the paper's released code")
    ] = "square",
    workers: Annotated[int | None, typer.Option(min=0, help="number of threads (default: one per core)")] = None,
    label: Annotated[str, typer.Option(help="the column of a table that says the class")] = "label",
    split: Annotated[str, typer.Option(help="the column of a table that says train, test, query or gallery")] = "split",
    exclude_same: Annotated[
        str | None, typer.Option(help="re-identification: a column, such as camera, that a query and its matches may not share")
    ] = None,
) -> None:
    """Decode and resize all images once, into a store that training reads without decoding.

    `xbm train --store` needs only this folder, not the original images.

    If interrupted, run the command again: it continues where it stopped. After images have changed, it updates only those.

    Example: `xbm prepare cars --root ~/data/cars --out ~/data/cars-store`, or `xbm prepare ./photos --out ./photos-store`
    """
    from xbm_app.data import store
    from xbm_app.data.images import parts

    if (out / "config.yaml").exists():
        raise InputError(f"{out} is a run folder: use another --out for the store")
    dataset = _read_dataset(data, root, label, split, exclude_same)
    sets = {store.folder_of(name): images for name, images in parts(dataset).items()}
    count = sum(len(images) for images in sets.values())
    needed = sum(store.to_write(images, out / name, resize, mode) for name, images in sets.items())
    typer.echo(f"{count:,} images in {len(sets)} sets: about {needed / 1e9:.2f} GB to write to {out}")
    store.require_room(out, needed)
    for name, images in sets.items():
        store.prepare(images, out / name, resize, mode, workers)
        typer.echo(f"{out / name}: {len(images):,} images")
    store.write_outline(dataset, out)


def _read_dataset(data: str, root: Path | None, label: str, split: str, exclude_same: str | None) -> "Dataset":
    from xbm_app.data.benchmarks import BENCHMARKS, read_benchmark
    from xbm_app.data.hub_datasets import PREFIX
    from xbm_app.data.own_data import is_table, read_own
    from xbm_app.data.own_images import Columns, read_table

    columns = Columns(label, split, exclude_same)
    if data in BENCHMARKS:
        if root is None:
            raise InputError(f"the folder with {data} is not set: xbm prepare {data} --root DIR --out STORE")
        return read_benchmark(data, root)
    path = Path(data)
    if root is not None and is_table(path):
        return read_table(path, root, columns=columns)
    if path.exists() or data.startswith(PREFIX):
        return read_own(data, columns)
    raise unknown("benchmark or folder", data, BENCHMARKS)
