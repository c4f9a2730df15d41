"""Export: a trained model as ONNX and torch.export files that run without xbm, with a model card.

`export_run` writes the files of a run, and compares the exported models with the run on the same images. Both formats take any
batch size.
"""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xbm.errors import InputError
from xbm_app.data.decoding import LONGEST
from xbm_app.data.feeds import DecodeFeed
from xbm_app.data.transforms import normalisation
from xbm_app.files import replacing, verify, write_bytes
from xbm_app.train.dataset import read_run
from xbm_app.train.load import Embedder, load
from xbm_app.train.pretrained import write_card

IMAGES = 100  # on which an exported model is compared with the run
TOLERANCE = 1e-4
OPSET = 18
EXAMPLE = 2  # batch size while the graph is recorded: torch would treat 1 as a constant


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


# ------------------------------------------------------------------ the exported model, and the two formats it is written in


class Portable(nn.Module):
    """A model that takes bytes: it normalizes the pixels itself, and its embeddings have unit length."""

    offset: Tensor  # (C, 1, 1)
    gain: Tensor

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.model = copy.deepcopy(embedder.model).to("cpu", memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        offset, gain = (torch.from_numpy(value)[:, None, None] for value in normalisation(embedder.augmentation))
        self.register_buffer("offset", offset)
        self.register_buffer("gain", gain)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embeds images.

        Args:
            pixels: (B, C, crop, crop) uint8.

        Returns:
            (B, D) float32, unit rows.
        """
        return self.model((pixels.float() - self.offset) * self.gain)


def windows(embedder: Embedder, views: list[np.ndarray]) -> np.ndarray:
    """The center crop of resized images, as the exported model takes it: (B, C, crop, crop) uint8."""
    crop = embedder.augmentation.crop
    crops = []
    for view in views:
        top, left = (view.shape[0] - crop) // 2, (view.shape[1] - crop) // 2
        crops.append(view[top : top + crop, left : left + crop].transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(crops))


def record(model: nn.Module, channels: int, size: int) -> Any:
    """Records a model that takes (B, channels, size, size) uint8, for any B, as a `torch.export.ExportedProgram`."""
    example = torch.zeros(EXAMPLE, channels, size, size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=65_536)
    with _quietly(), torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes={"pixels": {0: batch}}, strict=False)


def write_program(program: Any, path: Path) -> None:
    """Writes a recorded model in torch.export's format."""
    with replacing(path, checksum=True) as beside, _quietly():
        torch.export.save(program, beside)


def write_onnx(program: Any, path: Path, properties: dict[str, str]) -> None:
    """Writes a recorded model as one ONNX file, with `properties` as its metadata."""
    import onnx

    if torch.__version__ < "2.7":  # compares versions, not text; the exporter of 2.6 fails with today's onnxscript
        raise InputError(f"exporting to ONNX needs torch 2.7 or later, this is {torch.__version__}: update torch")
    with _quietly():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=["pixels"],
            output_names=["embedding"],
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    for name, value in properties.items():
        proto.metadata_props.add(key=name, value=value)
    onnx.checker.check_model(proto)
    with replacing(path, checksum=True) as beside:
        onnx.save_model(proto, str(beside))


def run_onnx(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Loads an ONNX file: returns a function that embeds (B, C, crop, crop) uint8 on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(verify(path)), providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["embedding"], {"pixels": pixels})[0]


def run_program(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Loads a torch.export file: returns the same kind of function."""
    with _quietly():
        model = torch.export.load(verify(path)).module()

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(pixels)).numpy()

    return run


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences torch's exporters, which print progress and deprecations that do not concern the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
