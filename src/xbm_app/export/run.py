"""From a run folder to a folder of files to hand on; one that is not the same model does not stay there."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from xbm.errors import InputError
from xbm_app.data.transforms import LONGEST
from xbm_app.export.card import write_card
from xbm_app.export.formats import record, run_onnx, run_program, write_onnx, write_program
from xbm_app.export.graph import Portable
from xbm_app.export.parity import TOLERANCE, largest_difference, sample
from xbm_app.train.files import replacing
from xbm_app.train.load import load


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from the run.

    Attributes:
        difference: by file, the largest between a number of an embedding and the run's own.
        source: what it was measured on.
    """

    folder: Path
    difference: dict[str, float]
    source: str


def export_run(run: Path, out: Path) -> Exported:
    """Writes model.onnx, model.pt2, embed.py and MODEL_CARD.md to `out`.

    Raises:
        InputError: an exported model differs from the run by more than the tolerance.
    """
    embedder = load(run, device="cpu")
    augmentation = embedder.augmentation
    program = record(Portable(embedder), augmentation.channels, augmentation.crop)
    out.mkdir(parents=True, exist_ok=True)
    properties = {
        "resize": str(augmentation.resize),
        "crop": str(augmentation.crop),
        "channels": str(augmentation.channels),
        "longest": str(0 if augmentation.mode == "square" else LONGEST),
    }
    write_onnx(program, out / "model.onnx", properties)
    write_program(program, out / "model.pt2")
    compared = sample(embedder, run)
    runners = {"model.onnx": run_onnx(out / "model.onnx"), "model.pt2": run_program(out / "model.pt2")}
    difference = {name: largest_difference(runner, compared) for name, runner in runners.items()}
    for name, largest in difference.items():
        if not largest <= TOLERANCE:
            (out / name).unlink()
            raise InputError(
                f"{name} differed from the run by {largest:.1e} on {compared.source}, more than {TOLERANCE:.0e}, and was "
                "deleted: the exporter gets this trunk wrong, train another one"
            )
    told = ", ".join(f"`{name}` {largest:.1e}" for name, largest in difference.items())
    parity = f"Largest difference from the run on {compared.source}: {told}."
    sizes = {name: (out / name).stat().st_size for name in difference}
    script = files("xbm_app.export").joinpath("embed_onnx.txt").read_text(encoding="utf-8")
    for name, text in {"embed.py": script, "MODEL_CARD.md": write_card(embedder, run, parity, sizes)}.items():
        with replacing(out / name) as beside:
            beside.write_text(text, encoding="utf-8")
    return Exported(out, difference, compared.source)
