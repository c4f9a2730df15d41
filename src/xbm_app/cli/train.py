"""`xbm train`: the options of a run as words, and its scores as a table; `xbm presets`: the presets."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xbm.errors import InputError
from xbm_app.cli.tables import print_rows

if TYPE_CHECKING:
    from xbm_app.train.config import Config


def train(
    preset: Annotated[str, typer.Argument(help="glyphs, sop, inshop, vehicleid, cub, cars, deepfashion2, omniglot, own")] = "",
    data: Annotated[
        Path | None, typer.Option(help="your own images: a folder of class folders, a table, tar shards, or hf:NAME")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="the folder with the unpacked benchmark")] = None,
    store: Annotated[Path | None, typer.Option(help="a store created by `xbm prepare`")] = None,
    loss: Annotated[
        str | None, typer.Option(help="contrastive, triplet, ms, ..., or pml/NAME for a loss of pytorch-metric-learning")
    ] = None,
    trunk: Annotated[
        str | None, typer.Option(help="googlenet, resnet50, bn_inception, efficientnet_lite0, timm/NAME, ...")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="auto (default), paper, or official (as in the paper's released code)")
    ] = None,
    memory: Annotated[
        bool | None, typer.Option(help="train with or without a memory (default: with one, if the loss takes it)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="random seed (default: 0, or the config's value)")] = None,
    out: Annotated[Path | None, typer.Option(help="the run folder (default: a dated folder in runs/)")] = None,
    resume: Annotated[Path | None, typer.Option(help="resume the run in this folder")] = None,
    config: Annotated[Path | None, typer.Option(help="use a config file instead of a preset")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, e.g. optim.iterations=4000; may be repeated")
    ] = None,
    skip_problems: Annotated[bool, typer.Option("--skip-problems", help="leave out broken, tiny and duplicate images")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the result")] = False,
) -> None:
    """Train a model. A run can be killed at any moment and resumed with --resume.

    Examples: `xbm train glyphs` · `xbm train cars --root ~/cars --trunk resnet50` · `xbm train --data ./photos` ·
    `torchrun --nproc-per-node 8 -m xbm train sop --root ~/sop` (several GPUs) ·
    `xbm train cars --root ~/cars --set optim.iterations=4000 --loss ms` ·
    `xbm train glyphs --loss pml/ProxyAnchorLoss --set loss.options.alpha=16` · `xbm train --resume runs/2026-01-31_120000_cars`
    """
    from xbm_app.launch import TrainedRun
    from xbm_app.launch import train as run

    def done(trained: TrainedRun) -> None:
        show(trained.result)
        trained.report()
        print(trained.folder)

    run(
        data, out=out, preset=preset, root=root, store=store, loss=loss, trunk=trunk, recipe=recipe, memory=memory, seed=seed,
        set=parse_settings(settings), config=config, resume=resume, skip_problems=skip_problems, quiet=quiet, done=done,
    )  # fmt: skip


def parse_settings(settings: list[str] | None) -> dict[str, str]:
    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set takes key=value, such as --set optim.iterations=4000, got {setting}")
        if key.strip() in ("preset", "recipe"):
            raise InputError(
                f"--set {setting} would only rename the run: pass the preset as an argument, and the recipe with --recipe"
            )
        values[key.strip()] = value.strip()
    return values


def show(result: Mapping[str, Any]) -> None:
    """Prints the scores of a run as a table: one row per metric, one column per protocol."""
    from xbm_app.data.images import REID

    protocols = result["protocols"]
    first = next(iter(protocols.values()))
    names = [name for name in first if not name.endswith("_std") and name not in ("queries", "without_relevant")]
    trained, chosen = result.get("checkpoint_iterations", result["iterations"]), result.get("checkpoint") == "best.pt"
    rows = []
    for name in names:
        # a protocol with random galleries has two sets of scores: these are its own
        values = [scores.get(f"one_per_class/{name}", scores.get(name)) for scores in protocols.values()]
        title = name.replace("recall@", "cmc@") if REID in protocols else name
        rows.append([title, *("" if value is None else f"{100 * value:.2f}" for value in values)])
    caption = f"after {trained} iterations" + (" (best.pt)" if chosen else "")
    print_rows(["in percent", *protocols], rows, numbers=True, caption=caption)


def as_yaml(config: "Config") -> str:
    """The config as YAML, with what the source of its recipe does as comments beside the settings."""
    import yaml

    from xbm_app.train.config import to_dict
    from xbm_app.train.presets import FACTS, FAULTS

    facts, section, lines = FACTS.get(config.recipe, {}), "", list[str]()
    for line in yaml.safe_dump(to_dict(config), sort_keys=False).splitlines():
        key = line.partition(":")[0]
        section = section if key.startswith((" ", "-")) else key
        fact = facts.get(f"{section}.{key.strip()}", "")
        lines.append(f"{line.ljust(28)}  # {fact}" if fact else line)
    notes = [f"# as published, the released code {fault}" for fault in FAULTS]
    return "\n".join([*(notes if config.recipe == "official" else []), *lines]) + "\n"


def presets(
    name: Annotated[str | None, typer.Argument(help="print the config of this preset as YAML")] = None,
    loss: Annotated[str | None, typer.Option(help="the loss: contrastive, triplet, ms, ..., pml/NAME")] = None,
    trunk: Annotated[str | None, typer.Option(help="the trunk: googlenet, resnet50, bn_inception, ...")] = None,
    recipe: Annotated[str, typer.Option(help="the recipe: auto, paper or official")] = "auto",
) -> None:
    """List the presets, or print one as YAML for `xbm train --config`.

    With the recipes `paper` and `official`, comments beside the settings say what the paper or its released code does.

    Examples: `xbm presets` · `xbm presets cars --loss ms --trunk resnet50 > mine.yaml` · `xbm presets cars --recipe official`
    """
    from xbm_app.train.presets import DATASETS, RECIPES, TRUNKS, preset

    if name is not None:
        print(as_yaml(preset(name, loss, trunk, recipe)), end="")
        return
    rows = []
    for each in DATASETS:
        try:
            c = preset(each, loss, trunk, recipe)
        except InputError as error:  # the recipe official does not exist for all presets; a wrong name exists for none
            refused = error
            continue
        keyed = f", α {c.memory.alpha:g}" if c.memory.update == "backprop" else ""
        keyed += f", m {c.memory.momentum:g}" if c.memory.update != "queue" else ""
        decay = ", ".join(map(str, c.optim.decay_at)) or "–"
        rows.append([
            each, c.model.trunk, str(c.model.dim), f"{c.optim.lr:g}", decay, str(c.optim.iterations),
            f"{c.memory.ratio:g}" if c.memory.size is None else f"{c.memory.size:,} rows", c.memory.update + keyed,
            str(c.memory.start),
        ])  # fmt: skip
    if not rows:
        raise refused
    print_rows(["preset", "trunk", "dim", "lr", "lr × 0.1 at", "iterations", "R_M", "memory", "warm-up"], rows)
    print(f"each × losses contrastive, triplet, ms, ... × trunks {', '.join(TRUNKS)} × recipes {', '.join(RECIPES)}")
    print(f"shown with the recipe `{recipe}`; the default of `xbm train` is `auto`")
