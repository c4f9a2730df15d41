"""Writes small tar shards as WebDataset does."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

KINDS = {"ppm": "PPM", "png": "PNG", "jpg": "JPEG"}


def picture(number: int, side: int = 16, kind: str = "png") -> bytes:
    """A picture that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, KINDS[kind])
    return buffer.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return path


def write_shard(path: Path, labels: Sequence[Any], first: int = 0, kind: str = "png", cameras: Sequence[Any] = ()) -> Path:
    """A shard with one image per label: beside a .cls file, or beside a .json file with label and camera."""
    files = {}
    for number, label in enumerate(labels, start=first):
        files[f"{number:04d}.{kind}"] = picture(number, kind=kind)
        if cameras:
            said = {"label": label, "other": f"x{label}", "camera": cameras[number - first]}
            files[f"{number:04d}.json"] = json.dumps(said).encode()
        else:
            files[f"{number:04d}.cls"] = str(label).encode()
    return write_tar(path, files)
