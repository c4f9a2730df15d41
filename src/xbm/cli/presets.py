"""`xbm presets`: what can be trained out of the box."""

from typing import Annotated

import typer


def presets(
    name: Annotated[str | None, typer.Argument(help="show this preset's whole config")] = None,
    loss: Annotated[str | None, typer.Option(help="with this loss: contrastive, triplet, ms, ...")] = None,
    trunk: Annotated[str | None, typer.Option(help="with this trunk: googlenet, resnet50, bn_inception, ...")] = None,
    recipe: Annotated[str, typer.Option(help="by this recipe: auto, paper or official")] = "auto",
) -> None:
    """List the presets, or print one as YAML that `xbm train --config` takes.

    Examples: `xbm presets` · `xbm presets cars --loss ms --trunk resnet50 > mine.yaml`
    """
    from xbm.train.config import to_dict
    from xbm.train.presets import DATASETS, RECIPES, TRUNKS, preset

    if name is not None:
        import yaml

        print(yaml.safe_dump(to_dict(preset(name, loss, trunk, recipe)), sort_keys=False), end="")
        return
    from rich.table import Table

    from xbm.cli.tables import print_table

    table = Table("preset", "trunk", "dim", "lr", "lr × 0.1 at", "iterations", "R_M", "memory", "warm-up")
    for each in DATASETS:
        c = preset(each)
        keyed = "" if c.memory.update == "queue" else f", α {c.memory.alpha:g}, m {c.memory.momentum:g}"
        decay = ", ".join(map(str, c.optim.decay_at)) or "–"
        table.add_row(
            each, c.model.trunk, str(c.model.dim), f"{c.optim.lr:g}", decay, str(c.optim.iterations),
            f"{c.memory.ratio:g}", c.memory.update + keyed, str(c.memory.start),
        )  # fmt: skip
    print_table(table)
    print(f"each × losses contrastive, triplet, ms, ... × trunks {', '.join(TRUNKS)} × recipes {', '.join(RECIPES)}")
    print("the memory is listed as the recipe `paper` has it; `xbm train` takes `auto` unless told otherwise")
