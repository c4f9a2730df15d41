"""`xbm export`: a model that runs where there is no xbm."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="a folder; by default export in the run folder")] = None,
) -> None:
    """Write a trained model as ONNX and as a torch.export program, with a model card and a script that needs no xbm.

    Both take bytes, any number of images at once, and are compared with the run before the command ends.

    Example: `xbm export runs/2026-01-31_120000_cars --out cars_model`
    """
    from xbm.errors import InputError
    from xbm_app.extras import require

    require("search", "onnx", "onnxscript", "onnxruntime")
    from xbm_app.export.exporter import export_run

    if not run.exists():
        raise InputError(f"{run} does not exist: give a run folder made by `xbm train`")
    made = export_run(run, out or (run if run.is_dir() else run.parent) / "export")
    for name, largest in made.difference.items():
        size = (made.folder / name).stat().st_size
        print(f"{name}: {size / 1e6:.1f} MB, largest difference from the run {largest:.1e} on {made.source}")
    print(made.folder)
