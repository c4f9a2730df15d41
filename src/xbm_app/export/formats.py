"""Writing the two formats, each whole or not at all, with any number of images at once; and running them."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from xbm_app.train.files import replacing

OPSET = 18
EXAMPLE = 2  # images at once while the graph is recorded: torch would take 1 for a constant


def record(model: nn.Module, channels: int, size: int) -> Any:
    """The graph of a model that takes (B, channels, size, size) uint8, for any B, as a `torch.export.ExportedProgram`."""
    example = torch.zeros(EXAMPLE, channels, size, size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=65_536)
    with _quietly(), torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes={"pixels": {0: batch}}, strict=False)


def write_program(program: Any, path: Path) -> None:
    """Writes a recorded graph as torch's own format."""
    with replacing(path) as beside, _quietly():
        torch.export.save(program, beside)


def write_onnx(program: Any, path: Path, properties: dict[str, str]) -> None:
    """Writes a recorded graph as one ONNX file, with `properties` that its reader can ask for."""
    import onnx

    with _quietly():
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=["pixels"],
            output_names=["embedding"],
            verbose=False,
        )
    assert made is not None
    proto = made.model_proto
    for name, value in properties.items():
        proto.metadata_props.add(key=name, value=value)
    onnx.checker.check_model(proto)
    with replacing(path) as beside:
        onnx.save_model(proto, str(beside))


def run_onnx(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """A function that embeds (B, C, crop, crop) uint8 with ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["embedding"], {"pixels": pixels})[0]


def run_program(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The same with a torch.export program read back from its file."""
    with _quietly():
        model = torch.export.load(path).module()

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(pixels)).numpy()

    return run


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """torch's exporters talk about their own progress and deprecations, which says nothing to the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
