"""`xbm evaluate`: scores a run, or a file of embeddings."""

from pathlib import Path
from typing import Annotated

import typer

from xbm.errors import InputError


def evaluate(
    what: Annotated[Path, typer.Argument(help="a run folder, or an .npz with embeddings and labels")],
    root: Annotated[Path | None, typer.Option(help="where the data lies now, if it has moved since training")] = None,
    ks: Annotated[str | None, typer.Option(help="K of Recall@K for an .npz, e.g. 1,10,100")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the figures to this file")] = None,
) -> None:
    """Recall@K, MAP@R and R-precision by the data set's own protocol.

    Examples: `xbm evaluate runs/2026-01-31_120000_cars` · `xbm evaluate embeddings.npz --ks 1,10,100`
    """
    if what.is_file() and what.suffix == ".npz":
        from xbm_app.cli.evaluate_arrays import evaluate_npz, show_scores

        if root is not None:
            raise InputError("--root says where the images of a run lie: leave it out for an .npz")
        chosen = tuple(_whole(k) for k in ks.split(",")) if ks else (1, 10, 100, 1000)
        scores = evaluate_npz(what, chosen)
        show_scores(scores)
        result: dict = scores
    else:
        if ks is not None:
            raise InputError("--ks is for an .npz, a run is scored by its data set's own protocol: leave it out")
        from xbm_app.cli.train import show
        from xbm_app.train.scoring import evaluate_run

        result = evaluate_run(what, root)
        show(result)
    if json is not None:
        from xbm_app.train.finish import write_json

        write_json(json, result)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--ks takes whole numbers separated by commas, such as 1,10,100, not {text!r}") from None
