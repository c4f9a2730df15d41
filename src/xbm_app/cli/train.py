"""`xbm train`: from a preset and a few overrides to a finished run."""

import time
from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError


def train(
    preset: Annotated[str, typer.Argument(help="glyphs, sop, inshop, vehicleid, cub, cars, deepfashion2, omniglot, own")] = "",
    data: Annotated[
        Path | None, typer.Option(help="your own images: a folder of class folders, or a CSV / Parquet table")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="where a benchmark's files lie")] = None,
    store: Annotated[Path | None, typer.Option(help="a store made by `xbm prepare`")] = None,
    loss: Annotated[str | None, typer.Option(help="contrastive, triplet, ms, ...")] = None,
    trunk: Annotated[str | None, typer.Option(help="googlenet, resnet50, bn_inception, efficientnet_lite0, timm/NAME")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="auto (unless told otherwise), paper, or official: what the paper's released code does")
    ] = None,
    memory: Annotated[bool, typer.Option(help="train with the memory, or without it for comparison")] = True,
    seed: Annotated[
        int | None, typer.Option(help="of weights, batches and augmentation; 0 unless the config says other")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run folder; by default a dated one under runs/")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    config: Annotated[Path | None, typer.Option(help="a config file instead of a preset")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, e.g. optim.iterations=4000; may be repeated")
    ] = None,
    skip_problems: Annotated[bool, typer.Option("--skip-problems", help="leave broken images out of training")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="say nothing but the result")] = False,
) -> None:
    """Train a model. The run can be killed at any moment and goes on with --resume.

    Examples: `xbm train glyphs` · `xbm train cars --root ~/cars --trunk resnet50` · `xbm train --data ./photos` ·
    `torchrun --nproc-per-node 8 -m xbm train sop --root ~/sop` (several GPUs) ·
    `xbm train cars --root ~/cars --set optim.iterations=4000 --loss ms` · `xbm train --resume runs/2026-01-31_120000_cars`
    """
    from xbm_app.train import config as configs
    from xbm_app.train.dataset import read_data
    from xbm_app.train.loop import train as run
    from xbm_app.train.presets import preset as preset_of
    from xbm_app.train.presets import recipe_of

    if resume is not None:
        given = (
            preset,
            data,
            root,
            store,
            loss,
            trunk,
            recipe,
            seed is not None,
            out,
            config,
            settings,
            not memory,
            skip_problems,
        )
        if any(given):
            raise InputError("--resume goes on with the settings of the run: leave all others but --quiet out")
        if not (resume / "config.yaml").exists():
            raise InputError(f"{resume} holds no run: give the folder that `xbm train` printed")
        chosen, folder = configs.load(resume / "config.yaml"), resume
    else:
        one_by_one = parse_settings(settings)
        if not memory and "memory.ratio" in one_by_one:
            raise InputError("--no-memory is memory.ratio=0: leave one of the two out")
        if config is not None:
            if preset or loss or trunk or recipe:
                raise InputError("--config holds all settings: change single ones with --set, and leave the preset out")
            chosen = configs.load(config)
        else:
            if data is not None and preset not in ("", "own"):
                raise InputError("--data trains on your own images and takes no preset: leave one of them out")
            if data is None and not preset:
                raise InputError("say what to train on: a preset such as `xbm train glyphs`, or `xbm train --data DIR`")
            usual = "auto" if memory else "paper"  # which without memory is the batch's loss as the preset has it
            weights = one_by_one.get("model.weights")
            chosen = preset_of("own" if data is not None else preset, loss, trunk, recipe or usual, weights)
        changes: dict[str, object] = {}
        if seed is not None:
            changes["seed"] = seed
        if data is not None:
            changes |= {"data.name": "own", "data.root": str(data.resolve())}
        if root is not None:
            changes["data.root"] = str(root.resolve())
        if store is not None:
            changes["data.store"] = str(store.resolve())
        if not memory:
            changes["memory.ratio"] = 0.0
        if skip_problems:
            changes["data.skip_problems"] = True
        chosen = configs.override(chosen, {**changes, **one_by_one})
        if config is None and chosen.recipe == "auto" and chosen.data.name == "own":
            images = len(read_data(chosen.data).train)
            suited = recipe_of("auto", chosen.model.weights, "own", images)
            chosen = configs.override(chosen, {**suited, **changes, **one_by_one})
        kind = chosen.loss.name + ("" if chosen.memory.ratio else "_no_memory")
        stamp = time.strftime("%Y-%m-%d_%H%M%S")
        folder = out or Path("runs") / f"{stamp}_{chosen.data.name}_{kind}_seed{chosen.seed}"
    from xbm.distributed import together

    with together(chosen.device) as ranks:
        folder = Path(ranks.agreed(str(folder)))  # its name holds the time, which no two processes start at
        result = run(chosen, folder, resume=resume is not None, quiet=quiet)
        if ranks.first:
            from xbm_app.report.run_folders import report_runs

            show(result)
            report_runs([folder], folder / "report.html")
            print(folder)


def parse_settings(settings: list[str] | None) -> dict[str, str]:
    pairs = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting} is not key=value: write for example --set optim.iterations=4000")
        if key.strip() in ("preset", "recipe"):
            raise InputError(f"--set {setting} would only rename the run: choose a preset by its name, a recipe with --recipe")
        pairs[key.strip()] = value.strip()
    return pairs


def show(result: dict) -> None:
    """The figures of a run as a table: a row a measure, a column a protocol."""
    from rich.table import Table

    from xbm_app.cli.tables import print_table

    protocols = result["protocols"]
    first = next(iter(protocols.values()))
    names = [name for name in first if not name.endswith("_std") and name not in ("queries", "without_relevant")]
    table = Table("in percent", caption=f"after {result['iterations']} iterations")
    for protocol in protocols:
        table.add_column(protocol, justify="right")
    for name in names:
        # a protocol that draws galleries has the figures of both ways: its own are these
        shown = [scores.get(f"one_per_class/{name}", scores.get(name)) for scores in protocols.values()]
        table.add_row(name, *("" if value is None else f"{100 * value:.2f}" for value in shown))
    print_table(table)
