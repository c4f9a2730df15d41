"""`xbm presets`: what can be trained out of the box."""

from typing import Annotated

import typer

from xbm.errors import InputError


def presets(
    name: Annotated[str | None, typer.Argument(help="show this preset's whole config")] = None,
    loss: Annotated[str | None, typer.Option(help="with this loss: contrastive, triplet, ms, ...")] = None,
    trunk: Annotated[str | None, typer.Option(help="with this trunk: googlenet, resnet50, bn_inception, ...")] = None,
    recipe: Annotated[str, typer.Option(help="by this recipe: auto, paper or official")] = "auto",
) -> None:
    """List the presets, or print one as YAML that `xbm train --config` takes.

    Examples: `xbm presets` · `xbm presets cars --loss ms --trunk resnet50 > mine.yaml`
    """
    from xbm_app.train.config import to_dict
    from xbm_app.train.presets import DATASETS, RECIPES, TRUNKS, preset

    if name is not None:
        import yaml

        print(yaml.safe_dump(to_dict(preset(name, loss, trunk, recipe)), sort_keys=False), end="")
        return
    from rich.table import Table

    from xbm_app.cli.tables import print_table

    table = Table("preset", "trunk", "dim", "lr", "lr × 0.1 at", "iterations", "R_M", "memory", "warm-up")
    for each in DATASETS:
        try:
            c = preset(each, loss, trunk, recipe)
        except InputError as error:  # the released code's recipe is not for all of them; a wrong name is for none
            refused = error
            continue
        keyed = f", α {c.memory.alpha:g}" if c.memory.update == "backprop" else ""
        keyed += f", m {c.memory.momentum:g}" if c.memory.update != "queue" else ""
        decay = ", ".join(map(str, c.optim.decay_at)) or "–"
        table.add_row(
            each, c.model.trunk, str(c.model.dim), f"{c.optim.lr:g}", decay, str(c.optim.iterations),
            f"{c.memory.ratio:g}", c.memory.update + keyed, str(c.memory.start),
        )  # fmt: skip
    if not table.row_count:
        raise refused
    print_table(table)
    print(f"each × losses contrastive, triplet, ms, ... × trunks {', '.join(TRUNKS)} × recipes {', '.join(RECIPES)}")
    print(f"listed by the recipe `{recipe}`; `xbm train` takes `auto` unless told otherwise")
