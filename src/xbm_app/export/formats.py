"""The exported model, and the two formats it is written in: ONNX and torch.export, both for any batch size."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xbm.errors import InputError
from xbm_app.data.transforms import normalisation
from xbm_app.files import replacing, verify
from xbm_app.train.load import Embedder

OPSET = 18
EXAMPLE = 2  # batch size while the graph is recorded: torch would treat 1 as a constant


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
