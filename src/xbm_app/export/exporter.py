"""Exports a run: writes its files, and compares the exported models with the run on the same images."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.decoding import LONGEST
from xbm_app.data.feeds import DecodeFeed
from xbm_app.export.formats import Portable, record, run_onnx, run_program, windows, write_onnx, write_program
from xbm_app.files import write_bytes
from xbm_app.train.dataset import read_run
from xbm_app.train.load import Embedder, load
from xbm_app.train.pretrained import write_card

IMAGES = 100  # on which an exported model is compared with the run
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        difference: by file, the largest difference between its embeddings and the run's.
        source: the images on which it was measured.
    """

    folder: Path
    difference: dict[str, float]
    source: str


def export_run(run: Path, out: Path) -> Exported:
    """Writes model.onnx, model.pt2, embed.py and MODEL_CARD.md to `out`.

    Raises:
        InputError: an exported model differs from the run by more than the tolerance; its file is deleted.
    """
    embedder = load(run, device="cpu")
    augmentation = embedder.augmentation
    program = record(Portable(embedder), augmentation.channels, augmentation.crop)
    out.mkdir(parents=True, exist_ok=True)
    properties = {
        "resize": str(augmentation.resize),
        "crop": str(augmentation.crop),
        "channels": str(augmentation.channels),
        "interpolation": augmentation.interpolation,
        "longest": str(0 if augmentation.mode == "square" else LONGEST),
    }
    write_onnx(program, out / "model.onnx", properties)
    write_program(program, out / "model.pt2")
    compared = sample(embedder)
    runners = {"model.onnx": run_onnx(out / "model.onnx"), "model.pt2": run_program(out / "model.pt2")}
    difference = {name: largest_difference(runner, compared) for name, runner in runners.items()}
    for name, largest in difference.items():
        if not largest <= TOLERANCE:
            (out / name).unlink()
            raise InputError(
                f"{name} differed from the run by {largest:.1e} on {compared.source}, more than {TOLERANCE:.0e}, and was "
                "deleted: torch cannot export this trunk correctly, train another one"
            )
    differences = ", ".join(f"`{name}` {largest:.1e}" for name, largest in difference.items())
    parity = f"Largest difference from the run on {compared.source}: {differences}."
    sizes = {name: (out / name).stat().st_size for name in difference}
    write_bytes(out / "embed.py", files("xbm_app.export").joinpath("embed_onnx.txt").read_bytes())
    write_bytes(out / "MODEL_CARD.md", write_card(embedder, run, parity, sizes).encode())
    return Exported(out, difference, compared.source)


# ------------------------------------------------------------------ comparison with the run


@dataclass(frozen=True)
class Sample:
    """Images on which exported models are compared with the run.

    Attributes:
        source: what the images are, in words.
        pixels: (N, C, crop, crop) uint8, as the exported model takes them.
        wanted: (N, D) embeddings by the run itself.
    """

    source: str
    pixels: np.ndarray
    wanted: np.ndarray


def sample(embedder: Embedder) -> Sample:
    """Test images of the run, from the whole set; random pixels if its data is not available."""
    side, channels = embedder.augmentation.resize, embedder.augmentation.channels
    try:
        images = read_run(embedder.config, embedder.checkpoint.parents[1]).protocols[0].query
        indices = np.unique(np.linspace(0, len(images) - 1, IMAGES).astype(int)).tolist()
        feed = DecodeFeed(images, embedder.augmentation)
        views, source = [feed.view(index) for index in indices], f"{len(indices)} test images of {images.name}"
    except (InputError, OSError):
        random = np.random.default_rng(0)
        views = list(random.integers(0, 256, (IMAGES, side, side, channels), dtype=np.uint8))
        source = f"{IMAGES} images of random pixels (the data of the run is not available)"
    return Sample(source, windows(embedder, views), embedder.embed_views(views).numpy())


def largest_difference(run: Callable[[np.ndarray], np.ndarray], on: Sample) -> float:
    """The largest difference between an exported model's embeddings and the run's, computed in batches of various sizes."""
    outputs = [run(part) for part in np.split(on.pixels, [1, 8, min(45, len(on.pixels))]) if len(part)]
    return float(np.abs(np.concatenate(outputs) - on.wanted).max())
